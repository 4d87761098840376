"""`mm export`, `mm import`: one generation in a folder, to be had on another machine.

A bundle holds the system object with all that it needs, how it came about, and what the records
know: spec, lock, derivations. Importing gives the same generation: the same hashes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.deployments import Name
from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.rebuild import read_history
from mmadmin.cli.records import MOST, actor
from mmadmin.cli.store_exchange import signing_key
from mmadmin.cli.store_maintenance import progress_bar
from mmadmin.cli.store_names import open_store
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.store import Store


Folder = Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="FOLDER")]
RECORDED = ("spec_toml", "lock", "graph", "host_facts", "size_bytes")
"""What a generation's record says beside its system object; taken over as it is."""
FIELDS = {"name", "number", "author", "reason", *RECORDED}


def export(
    name: Name,
    folder: Folder,
    *,
    generation: Annotated[
        int | None, typer.Option(help="Which; else the live one, else the newest.", min=1, max=MOST)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a generation, with every byte that it needs, into a folder.

    Interrupt it and run it again: it goes on.

    Example: mm export smollm2-135m /mnt/stick/smollm2
    """
    person = actor()
    from deployments import queries
    from mmadmin.core.store.bundle import export_bundle

    row = queries.deployment(person, name)
    chosen = row.live or row.newest
    number = generation or (chosen.number if chosen else 0)
    found = queries.generation(person, name, number).generation
    if not found.system:
        raise Conflict(f"{found.uid} is {found.state}: it has not been built")
    extra = {
        "name": name,
        "number": found.number,
        "author": found.author.get_username(),
        "reason": found.reason,
        **{field: getattr(found, field) for field in RECORDED},
        **{kind: row.content for kind, row in queries.reports(person, found).items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"{folder} cannot be made: {error.strerror}", remedy="name a folder that can be written"
        ) from error
    with progress_bar("exporting", quiet=as_json) as hook:
        done = export_bundle(
            open_store(),
            found.system,
            folder,
            extra=extra,
            signer=signing_key(Home.from_env()),
            progress=hook,
        )
    if as_json:
        emit_json(
            {
                "generation": found.uid,
                "system": found.system,
                "folder": str(folder),
                "objects": done.objects,
                "sent_bytes": done.sent_bytes,
            }
        )
        return
    console.print(
        f"[bold]{escape(found.uid)}[/]: {counted(done.objects, 'object')}, "
        f"{bytes_text(done.sent_bytes)} written to {escape(str(folder))}"
    )


def import_(
    source: Annotated[
        Path,
        typer.Argument(help="A bundle's folder, or an exported history.", metavar="FOLDER|FILE"),
    ],
    *,
    generation: Annotated[
        int | None, typer.Option(help="Which one of an exported history.", min=1, max=MOST)
    ] = None,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why; kept in the history.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Take over an exported generation: the same bytes, ready to be activated.

    Of an exported history it takes the record alone: `mm rebuild` brings the bytes before.

    Example: mm import /mnt/stick/smollm2 --reason "from the test machine"
    """
    person = actor()
    from deployments import actions
    from mmadmin.core.store.bundle import import_bundle, read_bundle

    store = open_store()
    if source.is_file():
        if generation is None:
            raise InvalidInput(f"{source} is a whole history", remedy="add --generation NUMBER")
        extra, system = _of_history(source, generation, store)
    else:
        extra = _checked(read_bundle(source).extra, source)
        with progress_bar("importing", quiet=as_json) as hook:
            system = import_bundle(store, source, progress=hook).object
    origin = f"{extra['name']}/{extra['number']} by {extra['author']}"
    made = actions.import_generation(
        person,
        system=system,
        reason=reason or f"imported {origin}: {extra['reason']}".rstrip(": "),
        **{name: extra[name] for name in RECORDED},
        reports=extra,
    )
    store.add_root("generation", made.uid, system, f"generation {made.uid}")
    store.remove_root("imported", system)
    if as_json:
        emit_json(
            {
                "deployment": made.deployment.name,
                "number": made.number,
                "state": made.state,
                "system": made.system,
            }
        )
        return
    console.print(
        f"[bold]{escape(made.uid)}[/] is built; make it live with: "
        f"mm activate {escape(made.deployment.name)} {made.number}"
    )


def _of_history(file: Path, number: int, store: Store) -> tuple[dict[str, Any], str]:
    """What an exported history says of a generation, and its system, which must be here."""
    from mmadmin.core.generations.record_check import check_record
    from mmadmin.core.store.verify import require_intact

    recorded = read_history(file, number)
    if store.recorded(recorded.system) is None:
        raise NotFound(
            f"{recorded.uid} is not in this machine's store",
            remedy=f"make it again first: mm rebuild {file} {number}",
        )
    require_intact(store, recorded.system)
    fields = {"name": recorded.name, **recorded.fields}
    check_record(fields, str(file))
    return fields, recorded.system


def _checked(extra: Any, folder: Path) -> dict[str, Any]:
    from mmadmin.core.generations.record_check import check_record

    if not isinstance(extra, dict) or not set(extra) >= FIELDS:
        raise InvalidInput(
            f"{folder} holds an object, but not a generation",
            remedy="make the bundle with `mm export`, or use `mm store pull`",
        )
    check_record(extra, str(folder))
    return extra
