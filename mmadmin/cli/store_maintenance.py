"""`mm store`: keeping it small and sound: collect, verify, repair, reindex."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.installation import is_set_up
from mmadmin.cli.output import (
    JsonFlag,
    console,
    counted,
    emit_json,
    errors,
    escape,
    seconds_text,
)
from mmadmin.cli.records import connect
from mmadmin.cli.store_names import (
    ObjectNames,
    bytes_of,
    object_column,
    open_store,
    resolve_name,
    seconds_of,
)
from mmadmin.cli.tables import table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.callbacks import Progress as Hook
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import StoreCorrupt
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.store import Store
    from mmadmin.core.store.repair import BlobSource
    from mmadmin.core.store.verify import Verdict


@contextmanager
def progress_bar(words: str, *, quiet: bool) -> Iterator[Hook]:
    """A bar of bytes on a terminal; silence elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    if quiet or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn(words), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def gc(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    older_than: Annotated[
        str, typer.Option(help="Keep what was made within this time: 12h, 7d.", metavar="TIME")
    ] = "",
    keep: Annotated[
        int | None,
        typer.Option(help="Keep this many generations of each deployment.", min=1, metavar="N"),
    ] = None,
    max_free: Annotated[
        str, typer.Option(help="Stop once this much is freed: 20G.", metavar="SIZE")
    ] = "",
    expire_after: Annotated[
        str,
        typer.Option(
            help="Remove logs, quarantined files and unfinished downloads not touched for this "
            "long: 12h, 7d. Default: 30d, downloads 7d.",
            metavar="TIME",
        ),
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Free what no kept generation, running build or running engine needs.

    Example: mm store gc --dry-run --older-than 7d
    """
    from mmadmin.core.store.gc import collect

    store = open_store()
    let_go: list[str] = []
    if is_set_up(Home.from_env()):
        connect()
        from deployments.jobs.retention import renew_roots

        let_go = list(renew_roots(store, last=keep, dry_run=dry_run).let_go)
    done = collect(
        store,
        dry_run=dry_run,
        older_than_s=seconds_of(older_than) if older_than else 0,
        max_free_bytes=bytes_of(max_free) if max_free else None,
        expire_after_s=seconds_of(expire_after) if expire_after else None,
        on_wait=lambda holder: errors.print(f"[dim]waiting for {escape(holder)}[/]"),
    )
    if as_json:
        emit_json(done.as_json() | {"generations_let_go": let_go})
        return
    sizes = [[escape(name)] for name in done.objects]
    heading = object_column("would go" if dry_run else "went")
    table([heading], sizes, empty="nothing to collect")
    if let_go:
        verb = "would no longer be kept" if dry_run else "are no longer kept"
        console.print(f"generations that {verb}: {escape(', '.join(let_go))}")
    verb = "would be freed" if dry_run else "freed"
    console.print(
        f"{bytes_text(done.freed_bytes)} {verb} "
        f"({counted(len(done.objects), 'object')}, {counted(done.blobs, 'file')}, "
        f"{counted(done.expired, 'expired file')}, {counted(done.realisations, 'step record')}), "
        f"{counted(done.kept_objects, 'object')} kept, "
        f"{seconds_text(done.seconds)}"
    )


def verify_objects(
    names: ObjectNames = None,
    *,
    contents: Annotated[
        bool, typer.Option("--contents", help="Read every file and compare its digest.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Look for damage: each object is ok, corrupt or missing. Ends with 1 when one is not ok.

    Example: mm store verify --contents
    """
    from mmadmin.core.store.verify import verify

    store = open_store()
    wanted = [resolve_name(store, name) for name in names] if names else None
    lacking = {} if names else _lacking(store)
    with progress_bar("reading", quiet=as_json) as hook:
        found = verify(store, wanted, contents=contents, progress=hook)
    if as_json:
        emit_json(found.as_json() | {"lacking": lacking})
    else:
        _show_damage(found.damaged)
        for uid, lost in lacking.items():
            console.print(f"[red]missing[/]  {escape(lost)}, which {escape(uid)} needs")
        if lacking:
            console.print("[dim]→ `mm rebuild --live` brings back what is live[/]")
        ok = len(found.verdicts) - len(found.damaged)
        read = f", {bytes_text(found.read_bytes)} read" if contents else ""
        console.print(f"{ok} of {len(found.verdicts)} ok{read}, {seconds_text(found.seconds)}")
    if found.damaged or lacking:
        raise typer.Exit(1)


def _lacking(store: Store) -> dict[str, str]:
    """Live generations whose objects are not here, and what they lack, by the records."""
    if not is_set_up(Home.from_env()):
        return {}
    connect()
    from deployments.jobs import hosts

    return {generation.uid: lost for generation, lost in hosts.lacking(store).items()}


def _show_damage(damaged: tuple[Verdict, ...]) -> None:
    for verdict in damaged:
        console.print(f"[red]{verdict.state}[/] {escape(verdict.name)}")
        for problem in verdict.problems[:10]:
            console.print(f"    {escape(problem.path or 'the folder')} {escape(problem.message)}")


def repair(
    names: ObjectNames = None,
    *,
    contents: Annotated[
        bool, typer.Option("--contents/--no-contents", help="Read every file to find damage.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Repair damaged objects: only the bad files are pulled, fetched or built again.

    Damaged bytes are moved to the store's quarantine folder. Ends with 1 when something
    could not be repaired.

    Example: mm store repair
    """
    from mmadmin.core.store.repair import repair as repair_damaged
    from mmadmin.core.store.verify import verify

    home = Home.from_env()
    store = open_store()
    wanted = [resolve_name(store, name) for name in names] if names else None
    with progress_bar("reading", quiet=as_json) as hook:
        found = verify(store, wanted, contents=contents, progress=hook)
    sources = repair_sources(store, home)
    done = repair_damaged(store, found.damaged, sources, report=silent if as_json else _say)
    if as_json:
        emit_json(done.as_json())
    else:
        console.print(f"{len(done.repaired)} repaired, {len(done.failed)} could not be repaired")
    if done.failed:
        raise typer.Exit(1)


def _say(line: str) -> None:
    console.print(escape(line))


def repair_sources(store: Store, home: Home) -> list[BlobSource]:
    """Where damaged files are got from: the configured binary caches first, then their own step."""
    from mmadmin.cli.build import tools_of
    from mmadmin.core.build.rebuild import Rebuild
    from mmadmin.core.store.binary_cache import CacheSource
    from mmadmin.host.binary_caches import configured_caches

    caches, _ = configured_caches(home)
    return [*(CacheSource(cache) for cache in caches), Rebuild(store, tools_of(home, silent))]


def reindex(*, as_json: JsonFlag = False) -> None:
    """Rebuild the store's index from the records on the disk.

    Example: mm store reindex
    """
    from mmadmin.core.store import Store

    root = Home.from_env().store
    try:
        count = Store(root).reindex()
    except StoreCorrupt:
        for path in root.glob("index.sqlite3*"):  # it cannot even be opened: make a new one
            path.rename(path.with_name(f"damaged-{path.name}"))
        count = len(Store(root).names())
    if as_json:
        emit_json({"objects": count})
    else:
        sys.stdout.write(f"{counted(count, 'object')}\n")
