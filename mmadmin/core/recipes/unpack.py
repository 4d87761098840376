"""`unpack`: files out of a zip (wheel) or tar archive.

inputs: `archive`, an object with exactly one file. params, one of
`{"members": ["inside/a.bin", ...]}`: just these, flat by their base names;
`{"subtree": "name-1.0/engine"}`: everything below that folder, its prefix stripped (one leading
component may be `*`; "" = the whole archive). `members` may be objects
`{"member", "path"?, "sha256"?, "size"?}`; when all are pinned, the output is known beforehand.

Safe against hostile archives: no absolute or climbing paths, no links out of the output, no
devices, no member larger than it says, a bound on count and total size. The executable bit is kept,
all else of modes, owners and times is not. Bitwise: depends on the archive's bytes alone.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import posixpath
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmadmin.core.build.params import (
    at_path,
    fields,
    input_folder,
    items,
    number,
    refuse,
    relative_path,
    table,
    text,
)
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.errors import DigestMismatch, InvalidDerivation, InvalidInput

CHUNK = 1 << 20
TAR_RATIO = 6
"""Room for a tar's content by its packed size; source trees take four to five times."""
ROOM_STEP_BYTES = 64 << 20
"""Where that is not enough, room is reserved in steps of at least this size."""
MAX_MEMBERS = 200_000
MAX_BYTES = 1 << 40
MAX_RATIO = 1100
"""Unpacked : packed; deflate cannot do better than 1032 : 1."""


class HostileArchive(InvalidInput):
    """An archive that tries what an honest one never does."""

    code = "hostile_archive"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in an archive."""

    name: str
    kind: str
    """"file", "link" (symbolic), "hard", "folder", "other"."""
    size: int = 0
    executable: bool = False
    target: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One member to take out."""

    member: str
    path: str
    sha256: str = ""
    size: int = -1


def _wanted(value: Json, where: str) -> Wanted:
    if isinstance(value, str):
        value = {"member": value}
    entry = table(value, where)
    fields(entry, where, required=("member",), optional=("path", "sha256", "size"))
    member = relative_path(text(entry, "member", where), f"{where}.member")
    path = text(entry, "path", where, posixpath.basename(member))
    size = number(entry, "size", where) if "size" in entry else -1
    sha256 = text(entry, "sha256", where, "")
    return Wanted(member, relative_path(path, f"{where}.path"), sha256, size)


def _read(params: Params) -> tuple[str | None, list[Wanted]]:
    fields(params, "unpack", optional=("subtree", "members"))
    members = [
        _wanted(v, f"unpack.members[{i}]") for i, v in enumerate(items(params, "members", "unpack"))
    ]
    subtree = text(params, "subtree", "unpack", "")
    if members and subtree:
        refuse("unpack", dict(params), "either members or subtree")
    if subtree:
        relative_path(subtree, "unpack.subtree")
    paths = [wanted.path for wanted in members]
    if len(set(paths)) != len(paths):
        refuse("unpack.members", paths, "different base names, or a path for each")
    return (None if members else subtree), members


@contextmanager
def opened(archive: Path) -> Iterator[Iterator[tuple[Entry, IO[bytes] | None]]]:
    """The entries of a zip or tar with their bytes, in the archive's order.

    Raises `InvalidInput` for what is neither, and for one that is damaged or cut short.
    """
    try:
        with _opened(archive) as entries:
            yield entries
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise InvalidInput(
            f"{archive.name} is not a zip or tar archive, or it is damaged: {error}",
            remedy="check the pinned file",
        ) from error


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[tuple[Entry, IO[bytes] | None]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield _zip_entries(zipped, archive)
        return
    with tarfile.open(archive, "r:*") as tarred:
        yield _tar_entries(tarred)


def _zip_entries(
    zipped: zipfile.ZipFile, archive: Path
) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    packed = archive.stat().st_size
    for info in zipped.infolist():
        mode = info.external_attr >> 16
        if info.is_dir():
            yield Entry(info.filename.rstrip("/"), "folder"), None
            continue
        if mode and mode & 0o170000 not in (0, 0o100000):
            yield Entry(info.filename, "other"), None
            continue
        if info.file_size > MAX_RATIO * max(packed, 1):
            raise HostileArchive(
                f"{info.filename} claims {info.file_size} bytes", remedy="do not use this archive"
            )
        with zipped.open(info) as stream:
            yield Entry(info.filename, "file", info.file_size, bool(mode & 0o111)), stream


def _tar_entries(tarred: tarfile.TarFile) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    for info in tarred:
        if info.isfile():
            yield (
                Entry(info.name, "file", info.size, bool(info.mode & 0o111)),
                tarred.extractfile(info),
            )
        elif info.isdir():
            yield Entry(info.name, "folder"), None
        elif info.issym():
            yield Entry(info.name, "link", target=info.linkname), None
        elif info.islnk():
            yield Entry(info.name, "hard", target=info.linkname), None
        else:
            yield Entry(info.name, "other"), None


def _inside(subtree: str, name: str) -> str | None:
    """The path of `name` below `subtree`, "" for the folder itself, None when it is elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    above = [part for part in subtree.split("/") if part]
    if len(parts) < len(above):
        return None
    for i, (part, wanted) in enumerate(zip(parts, above, strict=False)):
        if part != wanted and not (i == 0 and wanted == "*"):
            return None
    return "/".join(parts[len(above) :])


class Writer:
    """Writes entries below the output, with all the checks."""

    def __init__(self, out: Path, tools: Toolbox, room_bytes: int) -> None:
        self.out, self.tools = out, tools
        self.count = self.bytes = 0
        self.reserved = room_bytes
        tools.reserve(room_bytes)

    def write(self, entry: Entry, stream: IO[bytes] | None, path: str) -> str:
        """Write a regular file; its sha256."""
        self._count(entry, path, entry.size)
        if stream is None:
            raise HostileArchive(f"{entry.name} has no content", remedy="check the archive")
        digest = hashlib.sha256()
        left = entry.size
        target, file = self._create(entry, path)
        with file as writer:
            while piece := stream.read(min(CHUNK, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise HostileArchive(
                        f"{entry.name} holds more than the {entry.size} bytes it claims",
                        remedy="do not use this archive",
                    )
                digest.update(piece)
                writer.write(piece)
        if left:
            raise InvalidInput(f"{entry.name} ends early in the archive", remedy="fetch it again")
        if entry.executable:
            target.chmod(0o755)
        self.tools.hashed(target, digest.hexdigest())  # spares the store a second reading
        return digest.hexdigest()

    def link(self, entry: Entry, path: str) -> None:
        """Write a symbolic link that stays inside the output."""
        self._count(entry, path, 0)
        landing = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        if (
            not entry.target
            or entry.target.startswith("/")
            or landing == ".."
            or landing.startswith("../")
        ):
            raise HostileArchive(
                f"{entry.name} links out of the archive, to {entry.target}",
                remedy="do not use this archive",
            )
        with refusing(entry):
            at_path(self.out, path).symlink_to(entry.target)

    def copy(self, entry: Entry, path: str, of: str | None) -> None:
        """Write a tar hard link as a copy of the file that came before it."""
        source = self.out / of if of else None
        if source is None or not source.is_file() or source.is_symlink():
            raise InvalidInput(
                f"{entry.name} is a hard link to {entry.target}, which is not unpacked",
                remedy="unpack a folder that holds both",
            )
        self._count(entry, path, source.stat().st_size)
        target, file = self._create(entry, path)
        with file, source.open("rb") as original:
            shutil.copyfileobj(original, file, CHUNK)
        target.chmod(source.stat().st_mode)

    def _create(self, entry: Entry, path: str) -> tuple[Path, IO[bytes]]:
        """A new file of the output."""
        with refusing(entry):
            target = at_path(self.out, path)
            return target, target.open("xb")

    def _count(self, entry: Entry, path: str, size: int) -> None:
        self.count += 1
        self.bytes += size
        if self.count > MAX_MEMBERS or self.bytes > MAX_BYTES:
            raise HostileArchive(
                f"the archive holds more than {MAX_MEMBERS} files or {MAX_BYTES} bytes",
                remedy="do not use this archive",
            )
        with refusing(entry):
            below_link = any((self.out / above).is_symlink() for above in Path(path).parents)
        if below_link:
            raise HostileArchive(
                f"{path} lies below a link of the archive", remedy="do not use this archive"
            )
        if os.path.lexists(self.out / path):
            raise HostileArchive(f"{path} is in the archive twice", remedy="check the archive")
        if self.bytes > self.reserved:
            self.reserved = max(self.bytes, self.reserved + ROOM_STEP_BYTES)
            self.tools.reserve(self.reserved)


@contextmanager
def refusing(entry: Entry) -> Iterator[None]:
    """Refuse a member that no file can be made of."""
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise HostileArchive(
            f"{entry.name} is both a file and a folder in the archive", remedy="check the archive"
        ) from None
    except ValueError:
        raise HostileArchive(
            f"the archive has a member {entry.name!r}", remedy="check the archive"
        ) from None
    except OSError as error:
        if error.errno not in {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}:
            raise
        raise HostileArchive(
            f"{entry.name[:80]}…: {os.strerror(error.errno)}", remedy="check the archive"
        ) from None


class Unpack:
    """Archive in, files out."""

    kind = "unpack"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        _read(params)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Known when every member is pinned by digest and size."""
        members = _read(params)[1]
        if not members or any(not one.sha256 or one.size < 0 for one in members):
            return None
        return [FixedFile(one.path, one.sha256, one.size) for one in members]

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Unpack what is wanted."""
        subtree, members = _read(params)
        archive = only_file(inputs)
        if subtree is None:
            take_members(archive, members, out, tools)
        else:
            take_subtree(archive, subtree, out, tools)


def take_members(archive: Path, members: list[Wanted], out: Path, tools: Toolbox) -> None:
    """Write the wanted members of an archive below `out`, with every check."""
    room = _room(archive, {one.member for one in members})
    tools.log(f"unpacking {len(members)} files of {archive.name}")
    with opened(archive) as entries:
        _take_members(entries, members, Writer(out, tools, room))


def take_subtree(archive: Path, subtree: str, out: Path, tools: Toolbox) -> None:
    """Write everything below a folder of an archive into `out`, with every check."""
    tools.log(f"unpacking {archive.name} ({archive.stat().st_size} bytes)")
    writer = Writer(out, tools, _room(archive, None))
    with opened(archive) as entries:
        _take_subtree(entries, subtree, writer, tools)
    tools.log(f"{writer.count} files, {writer.bytes} bytes")


def _room(archive: Path, members: Collection[str] | None) -> int:
    """Bytes to reserve first: exact for a zip; for a tar, corrected while it is read."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            return sum(
                info.file_size
                for info in zipped.infolist()
                if members is None or info.filename in members
            )
    return archive.stat().st_size * TAR_RATIO


def only_file(inputs: Mapping[str, Path]) -> Path:
    """The one file of the input `archive`; raises `InvalidDerivation`."""
    folder = input_folder(inputs, "archive")
    files = [path for path in folder.rglob("*") if path.is_file()]
    if len(files) != 1:
        raise InvalidDerivation(
            f"the input archive holds {len(files)} files", remedy="fetch the archive by itself"
        )
    return files[0]


def _take_members(
    entries: Iterator[tuple[Entry, IO[bytes] | None]], members: list[Wanted], writer: Writer
) -> None:
    missing = {one.member: one for one in members}
    names = []
    for entry, stream in entries:
        names.append(entry.name)
        wanted = missing.get(entry.name.removeprefix("./"))
        if wanted is None:
            continue
        if entry.kind != "file":
            raise InvalidInput(f"{entry.name} is not a regular file", remedy="name a file")
        if wanted.size >= 0 and wanted.size != entry.size:
            raise DigestMismatch(
                f"{entry.name} has {entry.size} bytes where the pin says {wanted.size}",
                remedy="update the lock if the archive was replaced on purpose",
            )
        found = writer.write(entry, stream, wanted.path)
        if wanted.sha256 and found != wanted.sha256:
            raise DigestMismatch(
                f"{entry.name} has sha256 {found}; the pin says {wanted.sha256}",
                remedy="update the lock if the archive was replaced on purpose",
                expected=wanted.sha256,
                actual=found,
                path=str(writer.out / wanted.path),
            )
        del missing[wanted.member]
        if not missing:
            return
    raise InvalidInput(
        f"the archive has no member {', '.join(sorted(missing))}",
        remedy=f"it holds {', '.join(names[:8])}{', …' if len(names) > 8 else ''}",  # noqa: PLR2004
    )


def _take_subtree(
    entries: Iterator[tuple[Entry, IO[bytes] | None]],
    subtree: str,
    writer: Writer,
    tools: Toolbox,
) -> None:
    for entry, stream in entries:
        path = _inside(subtree, entry.name)
        if path is None or (path == "" and entry.kind == "folder"):
            continue
        if entry.name.startswith("/") or ".." in entry.name.split("/") or not path:
            raise HostileArchive(
                f"the archive has a member {entry.name!r}", remedy="do not use this archive"
            )
        if entry.kind == "file":
            writer.write(entry, stream, path)
        elif entry.kind == "link":
            writer.link(entry, path)
        elif entry.kind == "hard":
            writer.copy(entry, path, _inside(subtree, entry.target))
        elif entry.kind != "folder":
            raise HostileArchive(
                f"{entry.name} is a device, pipe or other special file",
                remedy="do not use this archive",
            )
        tools.progress(writer.count, 0, "files")
    if not writer.count:
        raise InvalidInput(
            f"the archive has nothing below {subtree!r}", remedy="list it with tar or unzip"
        )


RECIPE: Recipe = Unpack()
