"""One host's store: blobs by digest, objects as trees of hard links, and the commit of both.

An object is complete or absent, whatever kills the process: its files are flushed before they
are linked, its folder appears by one rename, and it counts only once its row is in the index. A
path without a row is garbage; a row without a path is corrupt.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmadmin.core.canonical import canonical, parse
from mmadmin.core.derivation import Derivation
from mmadmin.core.errors import DiskFull, InvalidDerivation, NotFound, StoreCorrupt
from mmadmin.core.recipe import FixedFile
from mmadmin.core.store import tree
from mmadmin.core.store.disk import Disk, disk_full
from mmadmin.core.store.index import TABLES, Index
from mmadmin.core.store.ingest import Progress, copy_hashing, hash_file, silent
from mmadmin.core.store.layout import Layout, check_object_name, is_sha256
from mmadmin.core.store.locks import (
    Lease,
    LeaseRecord,
    WaitHook,
    file_lock,
    lease_in,
    leases_in,
    no_wait,
    sweep_leases,
)
from mmadmin.core.store.tree import Entry

SIDECAR_VERSION = 1
FLOOR_BYTES = 1 << 30
"""What must stay free on the store's disk, unless the caller says otherwise."""
EPOCH = (1, 1)
"""Access and modification time of everything in an object."""

StepHook = Callable[[str], None]
"""Called after each step of a commit, by name."""


def no_step(step: str) -> None:
    """Go on."""


RoomHook = Callable[["Store", DiskFull], None]
"""Called when a promise of room is refused, before it is asked for once more."""


def collect_for(store: Store, refusal: DiskFull) -> None:
    """Collect what nobody needs, just as much as the refused promise lacked."""
    from mmadmin.core.store.gc import make_room  # noqa: PLC0415 (it builds on this module)

    make_room(store, refusal)


@dataclass(frozen=True, slots=True)
class StoreObject:
    """A finished, immutable output."""

    name: str
    hash: str
    size: int
    """Bytes of all files."""
    files: tuple[Entry, ...]
    """Every path, sorted."""
    refs: tuple[str, ...]
    """Names of the objects that it needs at run time."""
    path: Path
    sealed_at: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Realisation:
    """The record that a derivation produced an object."""

    resolved_key: str
    derivation: str
    """Digest."""
    object: str
    """Name."""
    sandbox: str = "none"
    """What fenced the build in: bubblewrap, unshare, none; or fixed, for pinned content."""
    host: str = ""
    built_ms: int = 0
    built_at: int = 0
    """Unix seconds."""
    log: str = ""
    """File name under `logs/`."""

    @property
    def built_s(self) -> float:
        """How long it took."""
        return self.built_ms / 1000

    def as_json(self) -> dict[str, Any]:
        """The record as data."""
        return {
            "resolved_key": self.resolved_key,
            "derivation": self.derivation,
            "object": self.object,
            "sandbox": self.sandbox,
            "host": self.host,
            "built_ms": self.built_ms,
            "built_at": self.built_at,
            "log": self.log,
        }


@dataclass(frozen=True, slots=True)
class Root:
    """Something that must be kept, and why."""

    kind: str
    """generation, pin, …"""
    key: str
    object: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The root as data."""
        return {"kind": self.kind, "key": self.key, "object": self.object, "reason": self.reason}


class Staging:
    """A private attempt: what a step writes before it is sealed."""

    def __init__(self, store: Store, folder: Path, lease: Lease, inherit: tuple[int, ...]) -> None:
        self.folder = folder
        self.lease = lease
        self._store = store
        self._promises = ExitStack()
        self.inherit = inherit
        """Descriptors that programs should inherit (`pass_fds`): the locks outlive a kill."""
        self.sandbox = "none"
        """Set by the toolbox: bubblewrap, unshare or none."""
        self._known: dict[str, tuple[str, tuple[int, int, int]]] = {}

    @property
    def out(self) -> Path:
        """What becomes the object."""
        return self.folder / "out"

    @property
    def scratch(self) -> Path:
        """Thrown away at the end."""
        return self.folder / "scratch"

    def hashed(self, path: Path, sha256: str) -> None:
        """Tell that a file's digest is known, so that it is not read again.

        Forgotten when the file is changed afterwards (size, mtime or inode).
        """
        self._known[os.path.abspath(path)] = (sha256, _fingerprint(path.stat()))  # noqa: PTH100

    def reserve(self, size_bytes: int, *, wait_s: float = 0, on_wait: WaitHook = no_wait) -> None:
        """Promise room for what this attempt will write, until it ends; raises `DiskFull`."""
        self._promises.enter_context(
            self._store.reserve(
                size_bytes,
                owner=self.lease.owner,
                covers=self.folder,
                wait_s=wait_s,
                on_wait=on_wait,
            )
        )

    def take(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """Link a file that the store has to `to` (a new path); False when it does not.

        The file is shared with the store: it must not be written to.
        """
        if not take_blob(self._store.blob_path(sha256, executable=executable), size, to):
            return False
        self.hashed(to, sha256)
        return True

    def keep(self, path: Path, sha256: str) -> None:
        """Take a fetched file into the store now: it outlives this attempt, whatever becomes of it.

        It stays where it is, too, from now on shared with the store: it must not be written to.
        """
        self._store.keep_blob(path, sha256, stay=True)
        self.hashed(path, sha256)

    def close(self) -> None:
        """Give back what was promised."""
        self._promises.close()

    def known(self, path: Path, info: os.stat_result) -> str | None:
        """The digest that was told for the file as it is now."""
        found = self._known.get(os.path.abspath(path))  # noqa: PTH100
        return found[0] if found and found[1] == _fingerprint(info) else None


def _fingerprint(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns


class Store:
    """One host's store. Cheap to open; safe for many processes and threads at once."""

    def __init__(
        self,
        root: Path,
        *,
        floor_bytes: int = FLOOR_BYTES,
        after: StepHook = no_step,
        make_room: RoomHook = collect_for,
    ) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 (links in the way are the user's)
        self.layout = Layout(self.root)
        self.layout.create()
        self._objects = str(self.layout.objects)
        self.after = after
        self.make_room = make_room
        self.disk = Disk(self.root, self.layout.reservations, self.layout.lock("disk"), floor_bytes)
        self.index = Index(self.layout.index)
        self.index.prepare(self._fill)

    def close(self) -> None:
        """Close this thread's connection to the index."""
        self.index.close()

    # --- looking -------------------------------------------------------------------------------

    def object_path(self, name: str) -> Path:
        """Where an object is, or would be."""
        return self.layout.object(name)

    def has_object(self, name: str) -> bool:
        """True when the object is complete: a row and a path.

        A row without a path is `StoreCorrupt`.
        """
        if self.index.row("SELECT 1 FROM object WHERE name = ?", (name,)) is None:
            return False
        if not os.path.isdir(f"{self._objects}/{name}"):  # noqa: PTH112 (hot: a plan asks a lot)
            raise _missing_path(name)
        return True

    def object(self, name: str) -> StoreObject | None:
        """The object, or None; `StoreCorrupt` for a row without a path."""
        if not self.has_object(name):
            return None
        with self.index.snapshot() as index:
            return self._load(index, name)

    def objects(self) -> Iterator[StoreObject]:
        """Every object of the index, by name; paths are not looked at (see `verify`)."""
        for name in self.names():
            with self.index.snapshot() as index:
                found = self._load(index, name)
            if found is not None:  # collected meanwhile
                yield found

    def names(self) -> list[str]:
        """Names of all objects of the index, sorted."""
        with self.index.read() as index:
            return [row[0] for row in index.execute("SELECT name FROM object ORDER BY name")]

    def realisation(self, resolved_key: str) -> Realisation | None:
        """What a derivation with this key produced, while the object is there."""
        found = self.claim(resolved_key)
        return found if found is not None and self.has_object(found.object) else None

    def claim(self, resolved_key: str) -> Realisation | None:
        """What a derivation with this key produced, even when the object was collected."""
        row = self.index.row(
            "SELECT resolved_key, derivation, object, sandbox, host, built_ms, built_at, log"
            " FROM realisation WHERE resolved_key = ?",
            (resolved_key,),
        )
        return Realisation(*row) if row else None

    def realisations_of(self, object_name: str) -> list[Realisation]:
        """Every record that says how an object came about."""
        with self.index.read() as index:
            rows = index.execute(
                "SELECT resolved_key, derivation, object, sandbox, host, built_ms, built_at, log"
                " FROM realisation WHERE object = ? ORDER BY built_at, resolved_key",
                (object_name,),
            ).fetchall()
        return [Realisation(*row) for row in rows]

    def realisations_by(self, derivation: str) -> list[Realisation]:
        """Every record of what a derivation (by digest) came out as here."""
        with self.index.read() as index:
            rows = index.execute(
                "SELECT resolved_key, derivation, object, sandbox, host, built_ms, built_at, log"
                " FROM realisation WHERE derivation = ? ORDER BY built_at, resolved_key",
                (derivation,),
            ).fetchall()
        return [Realisation(*row) for row in rows]

    def last_built(self, recipe: str, name: str) -> Any | None:
        """The derivation (as data) of this recipe and name that was realised last, or None."""
        row = self.index.row(
            "SELECT derivation.digest FROM derivation"
            " JOIN realisation ON realisation.derivation = derivation.digest"
            " WHERE recipe = ? AND name = ? ORDER BY built_at DESC, digest LIMIT 1",
            (recipe, name),
        )
        return self.derivation(row[0]) if row else None

    def derivation(self, digest: str) -> Any | None:
        """The data of a derivation that was built here (`Derivation.as_json`), or None."""
        try:
            return parse(self.layout.derivation(digest).read_bytes())
        except FileNotFoundError:
            return None

    def fixed(self, files: Sequence[FixedFile], name: str) -> StoreObject | None:
        """The object with these pinned files, if it is here."""
        return self.object(tree.object_name(tree.fixed_entries(files), name))

    def closure(self, name: str) -> list[str]:
        """The object and everything that it needs, sorted; `NotFound` when it is not here."""
        with self.index.snapshot() as index:
            if index.execute("SELECT 1 FROM object WHERE name = ?", (name,)).fetchone() is None:
                raise NotFound(f"the store has no object {name}", remedy="see `mm store ls`")
            rows = index.execute(
                "WITH RECURSIVE needed(name) AS (VALUES (?) UNION"
                " SELECT target FROM reference JOIN needed ON reference.object = needed.name)"
                " SELECT name FROM needed ORDER BY name",
                (name,),
            ).fetchall()
        return [row[0] for row in rows]

    def object_size(self, name: str) -> int:
        """Bytes of an object's files; 0 when it is not here."""
        row = self.index.row("SELECT size FROM object WHERE name = ?", (name,))
        return row[0] if row else 0

    def lost_reference(self, name: str) -> str | None:
        """Something that a sealed object needs and that is not here, or None."""
        row = self.index.row(
            "WITH RECURSIVE needed(name) AS (VALUES (?) UNION"
            " SELECT target FROM reference JOIN needed ON reference.object = needed.name)"
            " SELECT needed.name FROM needed LEFT JOIN object ON object.name = needed.name"
            " WHERE object.name IS NULL LIMIT 1",
            (name,),
        )
        return row[0] if row else None

    def has_blob(self, sha256: str, *, executable: bool = False) -> bool:
        """True when the bytes are here in that form."""
        return self.layout.blob(sha256, executable=executable).is_file()

    def blob_path(self, sha256: str, *, executable: bool = False) -> Path:
        """Where the bytes are, or would be."""
        return self.layout.blob(sha256, executable=executable)

    def free_bytes(self) -> int:
        """Free bytes on the store's file system."""
        return self.disk.free_bytes()

    # --- claiming ------------------------------------------------------------------------------

    @contextmanager
    def lease(self, owner: str) -> Iterator[Lease]:
        """A claim of this process: what it protects is not collected while the process lives.

        Also clears away what dead processes left: leases, staging folders, reservations.
        """
        self.sweep()
        with lease_in(self.layout.leases, owner) as lease:
            self.after("leased")
            yield lease

    def leases(self, *, strict: bool = False) -> list[LeaseRecord]:
        """Every living lease; `strict` raises `StoreCorrupt` for a damaged record."""
        return leases_in(self.layout.leases, strict=strict)

    def protect(self, lease: Lease, names: Iterable[str]) -> list[str]:
        """Keep objects while the lease lasts; returns those that are not here (any more)."""
        names = list(names)
        with file_lock(self.layout.lock("gc"), shared=True):
            lease.add(names)
            return [name for name in names if not self.has_object(name)]

    @contextmanager
    def lock(self, key: str, *, on_wait: WaitHook = no_wait, owner: str = "") -> Iterator[int]:
        """Hold the named lock; yields a descriptor for children to inherit."""
        with file_lock(self.layout.lock(key), on_wait=on_wait, owner=owner) as fd:
            yield fd

    @contextmanager
    def reserve(
        self,
        size_bytes: int,
        *,
        owner: str = "",
        covers: Path | None = None,
        wait_s: float = 0,
        on_wait: WaitHook = no_wait,
    ) -> Iterator[None]:
        """Hold a promise of disk room (see `Disk.reserve`); raises `DiskFull`.

        Where room is short, what nobody needs is collected first, just as much as is short.
        """
        owner = owner or f"process {os.getpid()}"
        with ExitStack() as stack:
            try:
                stack.enter_context(self.disk.reserve(size_bytes, owner=owner, covers=covers))
            except DiskFull as refusal:
                on_wait(refusal.message)
                self.make_room(self, refusal)
                stack.enter_context(
                    self.disk.reserve(
                        size_bytes, owner=owner, covers=covers, wait_s=wait_s, on_wait=on_wait
                    )
                )
            self.after("reserved")
            yield

    @contextmanager
    def staging(self, lease: Lease, *, inherit: tuple[int, ...] = ()) -> Iterator[Staging]:
        """A private attempt folder with an empty `out` and `scratch`; removed at the end."""
        folder = self.layout.staging / f"{lease.id}-{uuid.uuid4().hex[:8]}"
        staging = Staging(self, folder, lease, inherit)
        staging.out.mkdir(parents=True)
        staging.scratch.mkdir()
        try:
            yield staging
        finally:
            self.remove(folder)
            staging.close()

    def sweep(self) -> None:
        """Clear away what dead processes left behind."""
        sweep_leases(self.layout.leases)
        living = {lease.id for lease in self.leases()}
        for folder in self.layout.staging.iterdir():
            if folder.name.rpartition("-")[0] not in living and _older_than_a_moment(folder):
                self.remove(folder)
        self.disk.reservations()

    # --- bringing in ---------------------------------------------------------------------------

    def ingest(
        self, source: Path, staging: Staging, path: str, *, progress: Progress = silent
    ) -> str:
        """Copy a file into the attempt's `out`, hashing it on the way; its sha256.

        Reserves the room first; a partial copy is removed. Raises `DiskFull`.
        """
        target = staging.out / tree.check_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        info = source.stat()
        with self.reserve(min(info.st_size, info.st_blocks * 512), owner=staging.lease.owner):
            try:
                sha256, _ = copy_hashing(source, target, progress=progress)
            except OSError as error:
                target.unlink(missing_ok=True)
                raise disk_full(error, doing=f"copying {path}") or error from error
        staging.hashed(target, sha256)
        return sha256

    def keep_blob(
        self, path: Path, sha256: str, *, executable: bool = False, stay: bool = False
    ) -> None:
        """Move a file's bytes into the store under their true digest, for whoever wants them.

        With `stay` the file is linked instead, so that no collection can come in between.
        """
        path.chmod(0o555 if executable else 0o444)
        _stamp(path)
        fsync_path(path)
        with file_lock(self.layout.lock("gc"), shared=True):
            blob = self.layout.blob(sha256, executable=executable)
            blob.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                os.link(path, blob)
                fsync_path(blob.parent)
            if not stay:
                path.unlink()

    def assemble(
        self,
        files: Sequence[FixedFile],
        staging: Staging,
    ) -> bool:
        """Fill the attempt's `out` from blobs that are here; False when one is missing."""
        linked: list[Path] = []
        for file in files:
            blob = self.layout.blob(file.sha256, executable=file.executable)
            target = staging.out / tree.check_path(file.path)
            if not take_blob(blob, file.size, target):
                for path in linked:
                    path.unlink()
                return False
            linked.append(target)
            staging.hashed(target, file.sha256)
        return True

    def seal(
        self,
        staging: Staging,
        name: str,
        *,
        refs: Iterable[str] = (),
        known: Mapping[str, str] | None = None,
        expect: str | None = None,
        realise: Callable[[str], Realisation] | None = None,
        derivation: Derivation | None = None,
        on_mismatch: Callable[[tuple[Entry, ...]], Exception] | None = None,
        progress: Progress = silent,
    ) -> StoreObject:
        """Commit the attempt's `out` as an object; the same content twice is one object.

        `known` and `staging.hashed` spare reading; `expect` is the object's name where it is
        pinned: when it comes out otherwise the files are kept as blobs and `on_mismatch` makes
        the error. `realise` makes the realisation's record from the object's name; it goes into
        the same index transaction. The object stays protected by the attempt's lease.
        """
        try:
            entries = self._hash_tree(staging, known or {}, progress)
            self.after("hashed")
            full = tree.object_name(entries, name)
            if expect is not None and full != expect:
                self._keep_files(staging, entries)
                raise (on_mismatch or _mismatch)(entries)
            return self._commit(
                staging,
                full,
                entries,
                refs=tuple(sorted(set(refs))),
                realise=realise,
                derivation=derivation,
            )
        except OSError as error:
            raise disk_full(error, doing=f"sealing {name}") or error from error

    def record(
        self,
        realisation: Realisation,
        derivation: Derivation | None = None,
        *,
        only_claimed: bool = False,
    ) -> None:
        """Write down that a derivation produced an object that is here.

        `only_claimed`: the object need not be here; a trusted store says so.
        """
        if not only_claimed and not self.has_object(realisation.object):
            raise NotFound(f"the store has no object {realisation.object}")
        self._write_realisation(realisation, derivation)
        with self.index.write() as index:
            _insert_realisation(index, realisation)
            if derivation is not None:
                _insert_derivation(index, derivation.digest, derivation.as_json())

    def copy_object_from(
        self, other: Store, name: str, lease: Lease, *, progress: Progress = silent
    ) -> StoreObject:
        """Take an object of another store of this machine: linked where the file system allows.

        Copied bytes are checked against the record. References must be here already.
        """
        found = other.object(name)
        if found is None:
            raise NotFound(f"{other.root} has no object {name}")
        missing = [ref for ref in found.refs if ref != name and not self.has_object(ref)]
        if missing:
            raise NotFound(f"{name} needs {missing[0]}, which is not here yet")
        if (here := self.object(name)) is not None and not self.protect(lease, [name]):
            return here
        with self.staging(lease) as staging:
            for entry in found.files:
                self._copy_entry(found.path, entry, staging, progress)
            return self.seal(staging, name[len(found.hash) + 1 :], refs=found.refs, expect=name)

    # --- roots ---------------------------------------------------------------------------------

    def add_root(self, kind: str, key: str, object_name: str, reason: str) -> None:
        """Keep an object, and say why; an earlier root of that kind and key is replaced."""
        root = Root(kind, key, object_name, reason)
        path = self.layout.root_file(kind, key)
        path.parent.mkdir(exist_ok=True)
        with file_lock(self.layout.lock("gc"), shared=True):
            if not self.has_object(object_name):
                raise NotFound(f"the store has no object {object_name}")
            _write_file(path, canonical(root.as_json()))

    def remove_root(self, kind: str, key: str) -> bool:
        """Stop keeping it; False when there was no such root."""
        try:
            self.layout.root_file(kind, key).unlink()
        except FileNotFoundError:
            return False
        return True

    def roots(self) -> list[Root]:
        """What was asked to be kept, and why; `StoreCorrupt` for a record that cannot be read."""
        found = []
        for path in sorted(self.layout.roots.glob("*/*.json")):
            try:
                value = parse(path.read_bytes())
            except FileNotFoundError:  # removed meanwhile
                continue
            except InvalidDerivation as error:
                raise StoreCorrupt(f"the root {path} is damaged: {error.message}") from error
            if not isinstance(value, dict) or set(value) != {"kind", "key", "object", "reason"}:
                raise StoreCorrupt(f"the root {path} is damaged")
            found.append(Root(*(str(value[k]) for k in ("kind", "key", "object", "reason"))))
        return found

    # --- the index -----------------------------------------------------------------------------

    def reindex(self) -> int:
        """Rebuild the index from the sidecars; the number of objects. Refuses damaged sidecars."""
        with file_lock(self.layout.lock("gc")), self.index.write() as index:
            for table in TABLES:
                index.execute(f"DELETE FROM {table}")  # noqa: S608 (a constant)
            self._fill(index)
        return len(self.names())

    # --- private -------------------------------------------------------------------------------

    def _fill(self, index: sqlite3.Connection) -> None:
        """Write all that the disk says into an empty index."""
        for path in sorted(self.layout.objects.glob("*.json")):
            found = self._read_sidecar(path)
            if found.path.is_dir():
                _insert_object(index, found)
        for path in sorted((self.layout.derivations / "realised").glob("*.json")):
            _insert_realisation(index, _realisation_from(path))
        for path in sorted(self.layout.derivations.glob("*.json")):
            try:
                _insert_derivation(index, path.stem, parse(path.read_bytes()))
            except InvalidDerivation as error:
                raise StoreCorrupt(
                    f"the record {path} is damaged: {error.message}",
                    remedy="move it away: it only tells how something was built",
                ) from error

    def _load(self, index: sqlite3.Connection, name: str) -> StoreObject | None:
        row = index.execute(
            "SELECT hash, size, sealed_at FROM object WHERE name = ?", (name,)
        ).fetchone()
        if row is None:
            return None
        entries = tuple(
            Entry(path, kind, bool(executable), size, sha256, target)
            for path, kind, executable, size, sha256, target in index.execute(
                "SELECT path, kind, executable, size, sha256, target FROM entry"
                " WHERE object = ? ORDER BY path",
                (name,),
            )
        )
        refs = tuple(
            ref
            for (ref,) in index.execute(
                "SELECT target FROM reference WHERE object = ? ORDER BY target", (name,)
            )
        )
        return StoreObject(name, row[0], row[1], entries, refs, self.layout.object(name), row[2])

    def _hash_tree(
        self, staging: Staging, known: Mapping[str, str], progress: Progress
    ) -> tuple[Entry, ...]:
        entries = []
        for found in tree.scan(staging.out):
            if found.kind == "link":
                entries.append(Entry(found.path, "link", target=found.target))
            elif found.kind == "dir":
                entries.append(Entry(found.path, "dir"))
            else:
                path = staging.out / found.path
                sha256 = known.get(found.path) or staging.known(path, found.stat)
                size = found.stat.st_size
                if sha256 is None:
                    sha256, size = hash_file(path, progress=progress)
                entries.append(
                    Entry(found.path, executable=found.executable, size=size, sha256=sha256)
                )
        return tuple(entries)

    def _commit(
        self,
        staging: Staging,
        full: str,
        entries: tuple[Entry, ...],
        *,
        refs: tuple[str, ...],
        realise: Callable[[str], Realisation] | None,
        derivation: Derivation | None,
    ) -> StoreObject:
        out = staging.out
        with self.lock(f"object-{full[:64]}", owner=staging.lease.owner):
            here = None if self.protect(staging.lease, [full]) else self.object(full)
            if here is None:
                self._canonicalise(out, entries)
                self.after("flushed")
            with file_lock(self.layout.lock("gc"), shared=True):
                self.after("committing")
                if here is None:
                    self._link_blobs(staging, entries)
                    self.after("linked")
                    target = self.layout.object(full)
                    if target.exists():  # a path without a row: an earlier attempt was killed
                        self.discard(target)
                    out.rename(target)
                    self.after("renamed")
                    target.chmod(0o555)
                    os.utime(target, EPOCH)
                    fsync_path(target)
                    here = StoreObject(
                        full,
                        full[:64],
                        tree.total_size(entries),
                        entries,
                        refs,
                        target,
                        int(time.time()),
                    )
                elif set(refs) - set(here.refs):
                    refs = tuple(sorted({*refs, *here.refs}))
                    here = StoreObject(
                        full, here.hash, here.size, entries, refs, here.path, here.sealed_at
                    )
                self.rewrite_record(here)
                self.after("described")
                realisation = realise(full) if realise else None
                if realisation is not None:
                    self._write_realisation(realisation, derivation)
                    self.after("claimed")
                with self.index.write() as index:
                    _insert_object(index, here)
                    if realisation is not None:
                        _insert_realisation(index, realisation)
                    if derivation is not None:
                        _insert_derivation(index, derivation.digest, derivation.as_json())
                self.after("indexed")
        self.after("unlocked")
        return here

    def _canonicalise(self, out: Path, entries: tuple[Entry, ...]) -> None:
        """Final modes and times, everything flushed: files first, then folders, inside out."""
        for entry in entries:
            if entry.kind == "file":
                path = out / entry.path
                path.chmod(0o555 if entry.executable else 0o444)
                _stamp(path)
                fsync_path(path)
            elif entry.kind == "link":
                os.utime(out / entry.path, EPOCH, follow_symlinks=False)

    def _link_blobs(self, staging: Staging, entries: tuple[Entry, ...]) -> None:
        """Give every file its blob, or take the blob that is there; then seal the folders."""
        folders = set()
        for entry in entries:
            if entry.kind != "file":
                continue
            path = staging.out / entry.path
            blob = self.layout.blob(entry.sha256, executable=entry.executable)
            blob.parent.mkdir(exist_ok=True)
            if self._share(path, blob, entry, staging.scratch):
                folders.add(blob.parent)
            self.after("blob")
        for folder in folders:
            fsync_path(folder)
        for entry in sorted(entries, reverse=True):
            if entry.kind == "dir":
                path = staging.out / entry.path
                path.chmod(0o555)
                os.utime(path, EPOCH)
                fsync_path(path)
        fsync_path(staging.out)

    def _share(self, path: Path, blob: Path, entry: Entry, scratch: Path) -> bool:
        """One inode for the file and its blob; True when the blob is new."""
        try:
            os.link(path, blob)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False  # this inode has all the links it can have: the file stays its own
        else:
            return True
        there = blob.stat()
        if os.path.samestat(there, path.stat()):
            return False
        temporary = scratch / uuid.uuid4().hex
        if there.st_size != entry.size:  # a damaged blob: ours is right
            os.link(path, temporary)
            temporary.replace(blob)
            return True
        try:
            os.link(blob, temporary)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False
        # the folder may be read-only for us only after it is sealed, which comes later
        temporary.replace(path)
        return False

    def _keep_files(self, staging: Staging, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.kind == "file":
                self.keep_blob(staging.out / entry.path, entry.sha256)

    def _copy_entry(self, source: Path, entry: Entry, staging: Staging, progress: Progress) -> None:
        target = staging.out / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "dir":
            target.mkdir(exist_ok=True)
        elif entry.kind == "link":
            target.symlink_to(entry.target)
        else:
            try:
                os.link(source / entry.path, target)
            except OSError:  # another file system: copy, and check
                self.ingest(source / entry.path, staging, entry.path, progress=progress)
                if entry.executable:
                    target.chmod(0o555)
                return
            staging.hashed(target, entry.sha256)

    def _write_realisation(self, realisation: Realisation, derivation: Derivation | None) -> None:
        if derivation is not None:
            path = self.layout.derivation(derivation.digest)
            if not path.exists():
                _write_file(path, canonical(derivation.as_json()))
        _write_file(
            self.layout.realisation(realisation.resolved_key), canonical(realisation.as_json())
        )

    def _read_sidecar(self, path: Path) -> StoreObject:
        name = path.name.removesuffix(".json")
        try:
            return object_from_record(path.read_bytes(), name, self.layout.object(name), str(path))
        except StoreCorrupt as error:
            error.remedy = (
                "while the index is whole, `mm store repair` writes it anew; else move it and the "
                "folder beside it away: the object is then built again"
            )
            raise

    def recorded(self, name: str) -> StoreObject | None:
        """What the index says about an object, whether its folder is there or not."""
        with self.index.snapshot() as index:
            return self._load(index, name)

    def record_of(self, found: StoreObject) -> dict[str, Any]:
        """What the record beside an object says."""
        return {
            "version": SIDECAR_VERSION,
            "name": found.name,
            "hash": found.hash,
            "size": found.size,
            "refs": list(found.refs),
            "files": [entry.as_json() for entry in found.files],
            "sealed_at": found.sealed_at,
        }

    def rewrite_record(self, found: StoreObject) -> None:
        """Write the record beside an object anew."""
        _write_file(self.layout.sidecar(found.name), canonical(self.record_of(found)))

    def discard(self, path: Path) -> Path:
        """Take a path out of sight by one rename into the trash; returns where it went."""
        target = self.layout.trash / uuid.uuid4().hex
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)  # moving a folder writes its ".."
        path.rename(target)
        return target

    def remove(self, folder: Path) -> None:
        """Remove a folder for good; nothing to do when another process did."""
        try:
            target = self.discard(folder)
        except FileNotFoundError:
            return
        unlink_tree(target)


def unlink_tree(path: Path) -> None:
    """Unlink a file or a folder that may hold read-only folders; forgives what vanishes."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        path.chmod(0o755)
        for below in list(path.iterdir()):
            unlink_tree(below)
        path.rmdir()


def object_from_record(data: bytes, name: str, path: Path, where: str) -> StoreObject:
    """The object that a record describes; `StoreCorrupt` unless it is that of its name.

    What an object holds is proven by its name; what it needs (`refs`) is not.
    """
    damaged = f"the record {where} is damaged"
    try:
        value = parse(data)
    except InvalidDerivation as error:
        raise StoreCorrupt(f"{damaged}: {error.message}") from error
    fields = {"version", "name", "hash", "size", "refs", "files", "sealed_at"}
    if not isinstance(value, dict) or set(value) != fields or value["name"] != name:
        raise StoreCorrupt(damaged)
    files, refs, sealed_at = value["files"], value["refs"], value["sealed_at"]
    if not isinstance(files, list) or not isinstance(refs, list) or not isinstance(sealed_at, int):
        raise StoreCorrupt(damaged)
    entries = tuple(tree.entry_from_json(entry) for entry in files)
    hashes = {tree.object_hash(entries), value["hash"], name[:64]}
    if len(hashes) != 1 or value["size"] != tree.total_size(entries):
        raise StoreCorrupt(f"the record {where} does not describe the object of its name")
    for ref in refs:
        if not isinstance(ref, str):
            raise StoreCorrupt(damaged)
        check_object_name(ref)
    return StoreObject(
        name,
        name[:64],
        tree.total_size(entries),
        entries,
        tuple(sorted(str(ref) for ref in refs)),
        path,
        sealed_at,
    )


def _realisation_from(path: Path) -> Realisation:
    try:
        value = parse(path.read_bytes())
    except InvalidDerivation as error:
        raise StoreCorrupt(f"the record {path} is damaged: {error.message}") from error
    found = realisation_from_json(value, str(path))
    if found.resolved_key != path.stem:
        raise StoreCorrupt(f"the record {path} is that of another step")
    return found


def realisation_from_json(value: Any, where: str) -> Realisation:
    """The record of `Realisation.as_json`; `StoreCorrupt` for anything else."""
    kinds = {
        "resolved_key": str,
        "derivation": str,
        "object": str,
        "sandbox": str,
        "host": str,
        "built_ms": int,
        "built_at": int,
        "log": str,
    }
    if (
        not isinstance(value, dict)
        or set(value) != set(kinds)
        or not all(isinstance(value[name], kind) for name, kind in kinds.items())
        or not is_sha256(value["resolved_key"])
        or not is_sha256(value["derivation"])
    ):
        raise StoreCorrupt(f"a record in {where} is damaged")
    check_object_name(value["object"])
    return Realisation(**value)


def _insert_object(index: sqlite3.Connection, found: StoreObject) -> None:
    index.execute(
        "INSERT OR REPLACE INTO object VALUES (?, ?, ?, ?)",
        (found.name, found.hash, found.size, found.sealed_at),
    )
    index.executemany(
        "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (found.name, e.path, e.kind, int(e.executable), e.size, e.sha256, e.target)
            for e in found.files
        ],
    )
    index.executemany(
        "INSERT OR IGNORE INTO reference VALUES (?, ?)", [(found.name, ref) for ref in found.refs]
    )


def _insert_realisation(index: sqlite3.Connection, realisation: Realisation) -> None:
    index.execute(
        "INSERT OR REPLACE INTO realisation VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        tuple(realisation.as_json().values()),
    )


def _insert_derivation(index: sqlite3.Connection, digest: str, row: Any) -> None:
    if isinstance(row, dict):
        values = (digest, row.get("recipe", ""), row.get("name", ""))
        index.execute("INSERT OR REPLACE INTO derivation VALUES (?, ?, ?)", values)


def _missing_path(name: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"the store's index names {name}, but its folder is gone",
        remedy="mend it with `mm store repair`",
        object=name,
    )


def _mismatch(entries: tuple[Entry, ...]) -> Exception:
    return StoreCorrupt("the content is not what its pin says", files=[e.path for e in entries])


def _older_than_a_moment(folder: Path) -> bool:
    """False for a folder that a lease we did not see yet may just have made."""
    try:
        return time.time() - folder.stat().st_ctime > 1
    except FileNotFoundError:
        return False


def take_blob(blob: Path, size: int, target: Path) -> bool:
    """Link a blob to a new path; False when it is not there or not whole."""
    try:
        if blob.stat().st_size != size:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(blob, target)
    except FileNotFoundError:
        return False
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EMLINK, errno.EXDEV}:
            raise
        shutil.copy2(source, target)


def _stamp(path: Path) -> None:
    """Set the times; not written when they are right, so that a shared inode is left alone."""
    if path.stat().st_mtime_ns != EPOCH[1] * 10**9:
        os.utime(path, EPOCH)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_file(path: Path, data: bytes) -> None:
    """Replace a small file at once: the old content or the new, never a part."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)
