"""Finding damage.

Each object is ok, corrupt or missing. The stat check looks at every path (type, size, mode, time,
link target) and at the record; with contents, every distinct file is read once, in bounded memory.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmadmin.core.callbacks import Progress, silent
from mmadmin.core.canonical import parse
from mmadmin.core.errors import InvalidDerivation, NotFound, StoreCorrupt
from mmadmin.core.store.files import EPOCH
from mmadmin.core.store.ingest import hash_file
from mmadmin.core.store.reader import Reader
from mmadmin.core.store.records import StoreObject
from mmadmin.core.store.tree import Entry

State = Literal["ok", "corrupt", "missing"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong at one path of an object."""

    path: str
    """Inside the object; empty for the object's folder, `.json` for its record."""
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an object is."""

    name: str
    state: State
    problems: tuple[Problem, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The verdict as data."""
        return {
            "name": self.name,
            "state": self.state,
            "problems": [{"path": p.path, "problem": p.message} for p in self.problems],
        }


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification."""

    verdicts: tuple[Verdict, ...]
    contents: bool
    read_bytes: int
    seconds: float

    @property
    def damaged(self) -> tuple[Verdict, ...]:
        """The objects that are not ok."""
        return tuple(verdict for verdict in self.verdicts if verdict.state != "ok")

    def as_json(self) -> dict[str, Any]:
        """The result as data: counts, and each object that is not ok."""
        states = [verdict.state for verdict in self.verdicts]
        return {
            "ok": states.count("ok"),
            "corrupt": states.count("corrupt"),
            "missing": states.count("missing"),
            "contents": self.contents,
            "read_bytes": self.read_bytes,
            "seconds": round(self.seconds, 3),
            "damaged": [verdict.as_json() for verdict in self.damaged],
        }


def verify(
    store: Reader,
    names: Iterable[str] | None = None,
    *,
    contents: bool = False,
    progress: Progress = silent,
) -> Verified:
    """Check objects, all of them by default.

    With `contents`, `progress` is told the bytes read and to be read, and a file that turns out to
    be damaged gets a new modification time: from then on every stat check sees it, and no build
    takes its bytes.
    """
    begin = time.monotonic()
    objects = list(store.objects()) if names is None else [recorded(store, n) for n in names]
    problems = {found.name: stat_problems(store, found) for found in objects}
    read = 0
    if contents:
        read = _read_contents(objects, problems, progress)
    verdicts = []
    for found in objects:
        wrong = problems[found.name]
        missing = any(p.path == "" and p.message == GONE for p in wrong)
        state: State = "missing" if missing else "corrupt" if wrong else "ok"
        verdicts.append(Verdict(found.name, state, tuple(wrong)))
    return Verified(tuple(verdicts), contents, read, time.monotonic() - begin)


def require_intact(store: Reader, name: str) -> None:
    """Raise `StoreCorrupt` unless an object and all that it needs pass the stat check."""
    lost = store.lost_reference(name)
    if lost is not None:
        raise StoreCorrupt(
            f"{lost} is not in the store" + ("" if lost == name else f", but {name} needs it"),
            remedy="build the generation again (`mm rebuild`), or pull it from another store",
            object=lost,
        )
    damaged = verify(store, store.closure(name)).damaged
    if damaged:
        first = damaged[0]
        where = first.problems[0].path or "its folder"
        raise StoreCorrupt(
            f"{first.name} is {first.state}: {where} {first.problems[0].message}",
            remedy=f"repair it with `mm store repair {first.name[:16]}`",
            object=first.name,
            damaged=[verdict.name for verdict in damaged],
        )


def absent(store: Reader, name: str) -> str | None:
    """An object that is not here although `name` needs it, or is it; None when all are here."""
    if store.recorded(name) is None:
        return name
    lost = store.lost_reference(name)
    if lost is not None:
        return lost
    folders = ((needed, store.object_path(needed)) for needed in store.closure(name))
    return next((needed for needed, folder in folders if not folder.is_dir()), None)


GONE = "is gone"


def recorded(store: Reader, name: str) -> StoreObject:
    """What the index says about an object, whole or not; `NotFound` when it says nothing."""
    found = store.recorded(name)
    if found is None:
        raise NotFound(f"the store has no object {name}", remedy="see `mm store ls`")
    return found


def is_intact(store: Reader, name: str) -> bool:
    """True when an object passes the stat check."""
    found = store.recorded(name)
    return found is not None and not stat_problems(store, found)


def stat_problems(store: Reader, found: StoreObject) -> list[Problem]:
    """What the stat check finds wrong with an object."""
    if not found.path.is_dir():
        return [Problem("", GONE)]
    problems = []
    if wrong := _wrong_inode(found.path.lstat(), Entry("", "dir")):
        problems.append(Problem("", wrong))
    if wrong := _wrong_record(store, found):
        problems.append(Problem(".json", wrong))
    problems += [
        Problem(entry.path, wrong)
        for entry in found.files
        if (wrong := _wrong_path(store, found, entry))
    ]
    expected = {entry.path for entry in found.files}
    problems += [
        Problem(path, "does not belong there") for path in sorted(_paths(found.path, "") - expected)
    ]
    return problems


def _paths(folder: Path, prefix: str) -> set[str]:
    found = set()
    with os.scandir(folder) as items:
        for item in items:
            found.add(prefix + item.name)
            if item.is_dir(follow_symlinks=False):
                found |= _paths(Path(item.path), f"{prefix}{item.name}/")
    return found


def _wrong_path(store: Reader, found: StoreObject, entry: Entry) -> str:
    path = found.path / entry.path
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return GONE
    linked = entry.kind == "link" and stat.S_ISLNK(info.st_mode)
    if linked and os.readlink(path) != entry.target:  # noqa: PTH115 (as written)
        return "points elsewhere"
    if wrong := _wrong_inode(info, entry):
        return wrong
    if entry.kind == "file":
        blob = store.blob_path(entry.sha256, executable=entry.executable)
        if not blob.exists():
            return "has lost its blob"
    return ""


def _wrong_inode(info: os.stat_result, entry: Entry) -> str:
    kinds = {"file": stat.S_ISREG, "dir": stat.S_ISDIR, "link": stat.S_ISLNK}
    if not kinds[entry.kind](info.st_mode):
        return f"is not a {entry.kind}"
    if entry.kind == "file" and info.st_size != entry.size:
        return f"has {info.st_size} bytes instead of {entry.size}"
    mode = 0o555 if entry.kind == "dir" or entry.executable else 0o444
    if entry.kind != "link" and stat.S_IMODE(info.st_mode) != mode:
        return f"has mode {stat.S_IMODE(info.st_mode):o} instead of {mode:o}"
    if int(info.st_mtime) != EPOCH[1]:
        return "was changed since it was sealed"
    return ""


def _wrong_record(store: Reader, found: StoreObject) -> str:
    try:
        value = parse(store.layout.sidecar(found.name).read_bytes())
    except FileNotFoundError:
        return GONE
    except InvalidDerivation:
        return "is damaged"
    return "" if value == store.record_of(found) else "disagrees with the index"


def _read_contents(
    objects: Sequence[StoreObject], problems: dict[str, list[Problem]], progress: Progress
) -> int:
    """Read every distinct file once; adds what is wrong to `problems`."""
    places: dict[tuple[int, int], list[tuple[str, Entry]]] = {}
    paths: dict[tuple[int, int], Path] = {}
    for found in objects:
        for entry in found.files:
            if entry.kind != "file":
                continue
            path = found.path / entry.path
            try:
                info = path.lstat()
            except OSError:  # said by the stat check
                continue
            if stat.S_ISREG(info.st_mode):
                places.setdefault((info.st_dev, info.st_ino), []).append((found.name, entry))
                paths[info.st_dev, info.st_ino] = path
    total = sum(path.stat().st_size for path in paths.values())
    done = 0
    for inode, path in paths.items():
        before = done
        try:
            sha256, size = hash_file(path, progress=partial(_shifted, progress, before, total))
            done += size
            message = f"has the content {sha256[:12]}… instead of"
        except OSError as error:
            sha256, message = "", f"cannot be read ({os.strerror(error.errno or 0)}), wanted is"
        wrong = [(name, entry) for name, entry in places[inode] if entry.sha256 != sha256]
        for name, entry in wrong:
            problems[name].append(Problem(entry.path, f"{message} {entry.sha256[:12]}…"))
        if wrong:
            os.utime(path)
    return done


def _shifted(progress: Progress, before: int, total: int, now: int, _: int) -> None:
    progress(before + now, total)
