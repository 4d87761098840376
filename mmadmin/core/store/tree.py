"""What an object holds: its entries, their canonical digest, and what may not be in one.

The object hash is the digest of the sorted list of (path, type, executable, size, sha256 | link
target). Files' digests come from whoever knows them, so that a 70-GB file is not read again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.canonical import digest
from mmadmin.core.errors import StepFailed, StoreCorrupt
from mmadmin.core.store.layout import is_sha256

OBJECT_DOMAIN = "mmadmin-object-v1"

Kind = Literal["file", "link", "dir"]


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One path of an object."""

    path: str
    """Relative POSIX path."""
    kind: Kind = "file"
    executable: bool = False
    size: int = 0
    """Bytes; 0 for links and folders."""
    sha256: str = ""
    target: str = ""
    """Of a link, as written."""

    def as_json(self) -> dict[str, Any]:
        """The entry as data; fields that do not apply are left out."""
        if self.kind == "file":
            return {
                "path": self.path,
                "type": "file",
                "executable": self.executable,
                "size": self.size,
                "sha256": self.sha256,
            }
        if self.kind == "link":
            return {"path": self.path, "type": "link", "target": self.target}
        return {"path": self.path, "type": "dir"}


def entry_from_json(data: Any) -> Entry:
    """The entry of `Entry.as_json`; `StoreCorrupt` for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("path"), str):
        raise StoreCorrupt(f"not an object entry: {data!r:.200}")
    check_path(data["path"])
    kind = data.get("type")
    fields = set(data) - {"path", "type"}
    if kind == "dir" and not fields:
        return Entry(data["path"], "dir")
    if kind == "link" and fields == {"target"} and isinstance(data["target"], str):
        return Entry(data["path"], "link", target=data["target"])
    if (
        kind == "file"
        and fields == {"executable", "size", "sha256"}
        and isinstance(data["executable"], bool)
        and isinstance(data["size"], int)
        and data["size"] >= 0
        and isinstance(data["sha256"], str)
        and is_sha256(data["sha256"])
    ):
        return Entry(
            data["path"],
            executable=data["executable"],
            size=data["size"],
            sha256=data["sha256"],
        )
    raise StoreCorrupt(f"not an object entry: {data!r:.200}")


def check_path(path: str) -> str:
    """The path itself when it stays inside the object it is relative to."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in {"", ".", ".."} for part in parts):
        raise StoreCorrupt(f"{path!r} is not a path inside an object")
    return path


def object_hash(entries: Iterable[Entry]) -> str:
    """The hash of an object with these entries."""
    rows = sorted(entries, key=lambda entry: entry.path)
    return digest(OBJECT_DOMAIN, [entry.as_json() for entry in rows])


def object_name(entries: Iterable[Entry], name: str) -> str:
    """The store name: `<hash>-<name>`."""
    return f"{object_hash(entries)}-{name}"


def fixed_entries(files: Sequence[FixedFile]) -> tuple[Entry, ...]:
    """The entries of an object whose files are pinned: they and the folders above them."""
    found: dict[str, Entry] = {}
    for file in files:
        check_path(file.path)
        for parent in PurePosixPath(file.path).parents:
            if str(parent) != ".":
                found[str(parent)] = Entry(str(parent), "dir")
        found[file.path] = Entry(
            file.path, executable=file.executable, size=file.size, sha256=file.sha256
        )
    return tuple(sorted(found.values()))


def total_size(entries: Iterable[Entry]) -> int:
    """Bytes of all files."""
    return sum(entry.size for entry in entries)


@dataclass(frozen=True, slots=True)
class Found:
    """One path as it lies on the disk, before it is hashed."""

    path: str
    kind: Kind
    stat: os.stat_result
    target: str = ""

    @property
    def executable(self) -> bool:
        """Whether it may be executed: the only permission that is part of an object."""
        return bool(self.stat.st_mode & 0o100)


def scan(root: Path) -> list[Found]:
    """Every path below `root`, sorted; refuses what an object may not hold.

    Raises `StepFailed` for devices, sockets, pipes, setuid or setgid files, names that are not
    UTF-8, and links that leave the object.
    """
    return sorted(_walk(root, root, ""), key=lambda found: found.path)


def _walk(root: Path, folder: Path, prefix: str) -> Iterator[Found]:
    with os.scandir(folder) as items:
        for item in items:
            path = prefix + item.name
            _check_name(path)
            info = item.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                target = str(Path(item.path).readlink())
                _check_link(root, path, target)
                yield Found(path, "link", info, target)
            elif stat.S_ISDIR(info.st_mode):
                yield Found(path, "dir", info)
                yield from _walk(root, Path(item.path), f"{path}/")
            elif stat.S_ISREG(info.st_mode):
                if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
                    raise StepFailed(f"the output holds a setuid or setgid file: {path}")
                yield Found(path, "file", info)
            else:
                raise StepFailed(f"the output holds a device, socket or pipe: {path}")


def _check_name(path: str) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StepFailed(f"the output holds a name that is not UTF-8: {path!r}") from error


def _check_link(root: Path, path: str, target: str) -> None:
    """A link may point anywhere inside its object, also at nothing, but never outside."""
    _check_name(target)
    place = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
    if target.startswith("/") or place == ".." or place.startswith("../"):
        raise StepFailed(f"the output's link {path} -> {target} leaves the object")
    # a link below a linked folder could still leave: follow what exists
    real = Path(os.path.realpath(root / path))
    if real != root.resolve() and root.resolve() not in real.parents:
        raise StepFailed(f"the output's link {path} -> {target} leaves the object")
