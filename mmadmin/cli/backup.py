"""`mm backup`, `mm restore`: an installation in one file, and the objects it needs beside it.

The file holds the records as they are at one moment, secrets and settings, and names the objects
that kept generations need. What belongs to the place stays out: sockets, engines and the secret
they are reached with, addresses of database and broker. The store can be left out, because every
generation can be made again from its record.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from mmadmin.cli import installation
from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.settings_file import read_settings, write_settings
from mmadmin.cli.store_exchange import signing_key
from mmadmin.cli.store_maintenance import progress_bar
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import Conflict, InvalidInput, StoreCorrupt
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.store import Store

FORMAT = 1
MANIFEST, RECORDS, SETTINGS = "backup.json", "db.sqlite3", "settings.json"
OF_THE_PLACE = ("DATABASE_URL", "REDIS_URL")
"""Settings that another place does not take over."""
NOT_SECRETS = ("engine_master",)
"""A restored gate must not be able to ask the engines of the old place."""
FILES = ("substituters.json", "first-run.json")
UNFINISHED = ".restoring"


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")],
    *,
    with_store: Annotated[
        bool,
        typer.Option(
            "--with-store", help="Also copy the objects of kept generations, into FILE.store/."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write records, secrets and settings into a file (0600), while everything runs.

    FILE.store/ gets only the objects that it does not have yet, so that a repeated backup is fast.

    Example: mm backup /backup/mm.tar --with-store
    """
    home = Home.from_env()
    if not installation.is_set_up(home):
        raise Conflict(f"nothing is set up in {home.root}", remedy="name it with MM_HOME")
    import django

    django.setup()
    from deployments.jobs.retention import kept_generations
    from mmadmin.core.store import Store
    from mmadmin.core.store.verify import absent

    home.store.mkdir(parents=True, exist_ok=True)
    store = Store(home.store)
    generations = kept_generations()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "made_at": int(time.time()),
        "home": str(home.root),
        "generations": {
            generation.uid: {
                "system": generation.system,
                "live": generation.deployment.live_id == generation.pk,
                "whole": absent(store, generation.system) is None,
            }
            for generation in generations
        },
    }
    with tempfile.TemporaryDirectory(dir=_folder_of(file), prefix=".mm-backup-") as scratch:
        _copy_records(home, Path(scratch) / RECORDS)
        _write_archive(file, manifest, _members(home, Path(scratch)))
    sent = _push(home, store, manifest, file) if with_store else None
    size = file.stat().st_size
    lacking = [uid for uid, row in manifest["generations"].items() if not row["whole"]]
    if as_json:
        emit_json({"file": str(file), "size_bytes": size, "store": sent, "lacking": lacking})
        return
    console.print(
        f"{escape(str(file))}: {bytes_text(size)}, {counted(len(generations), 'generation')}"
    )
    if sent is not None:
        console.print(f"{escape(str(store_of(file)))}: {bytes_text(sent)} written")
    if lacking:
        which = f"{lacking[0]} and {len(lacking) - 1} more" if len(lacking) > 1 else lacking[0]
        console.print(f"[yellow]incomplete in this store[/]: {escape(which)}")
    console.print("[dim]it holds secrets: keep it where only you can read it[/]")


def store_of(file: Path) -> Path:
    """The folder with the objects of a backup."""
    return file.with_name(file.name + ".store")


def _folder_of(file: Path) -> Path:
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InvalidInput(
            f"the folder {folder} does not exist", remedy="make it, or name another file"
        )
    return folder


def _copy_records(home: Home, target: Path) -> None:
    """The records as they are at one moment, as an SQLite file."""
    if not os.environ.get("DATABASE_URL"):
        with closing(sqlite3.connect(home.database)) as source, closing(_opened(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        return
    from django.db import connections, transaction

    from deployments import copying

    url = f"sqlite:///{target}"
    target.touch(mode=0o600)
    copying.open_database("backup", url)
    copying.prepare_target("backup", url)
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        copying.copy_all("default", "backup", lambda *_: None)
    copying.finish_target("backup")
    with connections["backup"].cursor() as cursor:
        cursor.execute("PRAGMA journal_mode=DELETE")
    connections["backup"].close()


def _opened(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    return sqlite3.connect(path)


def _members(home: Home, scratch: Path) -> dict[str, Path | bytes]:
    """What goes into the file, by name."""
    kept = {n: v for n, v in read_settings(home).values.items() if n not in OF_THE_PLACE}
    found: dict[str, Path | bytes] = {
        RECORDS: scratch / RECORDS,
        SETTINGS: json.dumps(kept, indent=1).encode(),
    }
    found |= {name: home.root / name for name in FILES if (home.root / name).exists()}
    for path in sorted(home.secrets.rglob("*")):
        if path.is_file() and path.name not in NOT_SECRETS and path.suffix != ".new":
            found[str(path.relative_to(home.root))] = path
    return found


def _write_archive(file: Path, manifest: dict[str, Any], members: dict[str, Path | bytes]) -> None:
    """The file, complete or as it was before."""
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    digests = {name: _digest(content) for name, content in members.items()}
    text = json.dumps(manifest | {"sha256": digests}, indent=1).encode()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            with tarfile.open(fileobj=out, mode="w:gz", compresslevel=3) as archive:
                for name, content in {MANIFEST: text, **members}.items():
                    _add(archive, name, content)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    info = tarfile.TarInfo(name)
    info.mode = 0o600
    if isinstance(content, bytes):
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
        return
    info.size = content.stat().st_size
    with content.open("rb") as source:
        archive.addfile(info, source)


def _digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _push(home: Home, store: Store, manifest: dict[str, Any], file: Path) -> int:
    """Copy what kept generations need; bytes that were not there yet."""
    from mmadmin.core.store.binary_cache import FolderCache
    from mmadmin.core.store.push import push

    whole = sorted({row["system"] for row in manifest["generations"].values() if row["whole"]})
    folder = store_of(file)
    folder.mkdir(mode=0o700, exist_ok=True)
    return push(store, whole, FolderCache(folder), signer=signing_key(home)).sent_bytes


def restore(
    file: Annotated[Path, typer.Argument(help="What `mm backup` wrote.", metavar="FILE")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Set up an empty MM_HOME from a backup; `mm up` starts it.

    Objects come from FILE.store/ if that is there; `mm rebuild --live` rebuilds what is missing.
    With DATABASE_URL set to an empty PostgreSQL database, the records go there.

    Example: MM_HOME=/srv/mm mm restore /backup/mm.tar
    """
    home = Home.from_env()
    manifest = _unpacked(file, home)
    import django

    django.setup()
    from deployments.jobs.hosts import forget_place, lacking
    from deployments.jobs.retention import renew_roots
    from mmadmin.cli.up import migrate
    from mmadmin.core.store import Store

    if os.environ.get("DATABASE_URL"):
        _to_database(home)
    else:
        migrate()
    forget_place()
    home.store.mkdir(parents=True, exist_ok=True)
    store = Store(home.store)
    _pull(store, manifest, file, quiet=as_json)
    renew_roots(store)
    installation.remember(home)
    (home.root / UNFINISHED).unlink()
    missing = sorted(generation.uid for generation in lacking(store))
    if as_json:
        emit_json({"home": str(home.root), "lacking": missing, **manifest})
        return
    console.print(f"{escape(str(file))} is restored into {escape(str(home.root))}")
    console.print("start it: [bold]mm up[/]")
    if missing:
        console.print(
            f"the store lacks bytes of {escape(', '.join(missing))}; after that:"
            " [bold]mm rebuild --live[/]"
        )


def _unpacked(file: Path, home: Home) -> dict[str, Any]:
    """Check the file, then lay it out in an empty home; what it says of itself.

    The settings come last: an interrupted restore leaves no installation and can be repeated.
    """
    mark = home.root / UNFINISHED
    if not mark.exists() and home.root.exists() and any(home.root.iterdir()):
        raise Conflict(
            f"{home.root} is not empty",
            remedy="name another folder with MM_HOME; a restore never overwrites an installation",
        )
    with tempfile.TemporaryDirectory(dir=_folder_of(home.root), prefix=".mm-restore-") as scratch:
        manifest = _read_archive(file, Path(scratch))
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()
        home.secrets.mkdir(mode=0o700, exist_ok=True)
        for name in manifest["sha256"]:
            if name != SETTINGS:
                (home.root / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.move(Path(scratch) / name, home.root / name)
        kept = json.loads((Path(scratch) / SETTINGS).read_text(encoding="utf-8"))
    for name, value in kept.items():
        os.environ.setdefault(name, value)
    installation.prepare(home)
    write_settings(home, {**kept, **read_settings(home).values})
    return manifest


def _read_archive(file: Path, folder: Path) -> dict[str, Any]:
    """Unpack into a folder and compare every digest. Raises `InvalidInput`, `StoreCorrupt`."""
    try:
        with tarfile.open(file, "r:gz") as archive:
            for member in archive:
                path = folder / member.name
                inside = Path(member.name).parts[0] in (
                    MANIFEST,
                    RECORDS,
                    SETTINGS,
                    *FILES,
                    "secrets",
                )
                if not member.isfile() or not inside or ".." in member.name:
                    raise InvalidInput(f"{file} is not a backup: it holds {member.name}")
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(descriptor, "wb") as out:
                    shutil.copyfileobj(cast("IO[bytes]", archive.extractfile(member)), out)
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digests = dict(manifest["sha256"])
    except (OSError, tarfile.TarError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{file} cannot be read as a backup: {error}", remedy="give what `mm backup` wrote"
        ) from error
    if manifest.get("format") != FORMAT:
        raise InvalidInput(
            f"{file} has the format {manifest.get('format')}, this mmadmin knows {FORMAT}",
            remedy="use the version of mmadmin that wrote it",
        )
    for name in _differing(folder, digests):
        raise StoreCorrupt(f"{file} is damaged: {name}", remedy="use another backup")
    return manifest


def _differing(folder: Path, digests: dict[str, str]) -> Iterator[str]:
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or _digest(path) != digest:
            yield name
    if RECORDS not in digests or SETTINGS not in digests:
        yield MANIFEST


def _to_database(home: Home) -> None:
    """Copy the unpacked records into the empty database that DATABASE_URL names."""
    from deployments import copying

    unpacked = f"sqlite:///{home.database}"
    copying.open_database("unpacked", unpacked)
    copying.bring_to_schema(unpacked)
    copying.prepare_target("default", os.environ["DATABASE_URL"])
    copying.copy_all("unpacked", "default", lambda *_: None)
    copying.finish_target("default")
    for path in home.root.glob(f"{home.database.name}*"):
        path.unlink()


def _pull(store: Store, manifest: dict[str, Any], file: Path, *, quiet: bool) -> None:
    """Take objects from the folder beside the file, if there is one."""
    from mmadmin.core.store.attestations import Trust
    from mmadmin.core.store.binary_cache import FolderCache
    from mmadmin.core.store.substitute import Substituter

    folder = store_of(file)
    if not folder.is_dir():
        return
    systems = {row["system"]: uid for uid, row in manifest["generations"].items()}
    with progress_bar("store", quiet=quiet) as hook, store.lease("restore") as lease:
        substituter = Substituter(store, [FolderCache(folder)], Trust({}), hook, lambda _: None)
        for system in systems:
            substituter.pull(system, lease)
