"""A closure in a folder, to be carried to another machine.

A bundle is a binary cache with a `bundle.json` that names the object, how it was made, and
what the caller adds (a generation's lock and spec). Its content is checked by hash; its records are
trusted by whoever imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.build.derivation import graph_from_json, graph_to_json, topological
from mmadmin.core.build.rebuild import load_graph
from mmadmin.core.build.recipe import Json
from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import InvalidInput, MmError, NotFound, StoreCorrupt
from mmadmin.core.store.attestations import SigningKey, Trust
from mmadmin.core.store.binary_cache import FolderCache
from mmadmin.core.store.layout import check_object_name
from mmadmin.core.store.push import Pushed, push
from mmadmin.core.store.records import Realisation, realisation_from_json
from mmadmin.core.store.store import Store
from mmadmin.core.store.substitute import Substituter

BUNDLE_VERSION = 1
FILE = "bundle.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a `bundle.json` says."""

    object: str
    records: tuple[Realisation, ...]
    """How it and what led to it came about."""
    graph: Json
    """The derivations (`graph_to_json`), or None when the store did not know them."""
    extra: Json
    """The caller's."""


def export_bundle(
    store: Store,
    name: str,
    folder: Path,
    *,
    extra: Json = None,
    signer: SigningKey | None = None,
    progress: Progress = silent,
    report: Report = silent,
) -> Pushed:
    """Write an object with all it needs into a folder; an interrupted export resumes."""
    done = push(store, [name], FolderCache(folder), signer=signer, progress=progress, report=report)
    records, graph = _history(store, name)
    data = {
        "version": BUNDLE_VERSION,
        "object": name,
        "records": [record.as_json() for record in records],
        "graph": graph,
        "extra": extra,
    }
    FolderCache(folder).write(FILE, canonical(data))
    return done


def read_bundle(folder: Path) -> Bundle:
    """What a folder's `bundle.json` says; `InvalidInput` when it is not valid."""
    try:
        value = parse((folder / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{folder} is not a bundle: it has no {FILE}",
            remedy="give the exported folder",
        ) from None
    except MmError as error:
        raise InvalidInput(f"{folder / FILE} is damaged: {error.message}") from error
    fields = {"version", "object", "records", "graph", "extra"}
    if not isinstance(value, dict) or set(value) != fields or value["version"] != BUNDLE_VERSION:
        raise InvalidInput(f"{folder / FILE} is damaged, or of another version of mmadmin")
    records = value["records"]
    if not isinstance(records, list):
        raise InvalidInput(f"{folder / FILE} is damaged")
    return Bundle(
        check_object_name(str(value["object"])),
        tuple(realisation_from_json(record, str(folder / FILE)) for record in records),
        value["graph"],
        value["extra"],
    )


def import_bundle(
    store: Store, folder: Path, *, progress: Progress = silent, report: Report = silent
) -> Bundle:
    """Take over an exported object with all it needs, and the records of how it came about.

    Every byte is compared with the hash that names it. The caller sets a root on the object.
    Raises `StoreCorrupt` when the bundle is not whole.
    """
    bundle = read_bundle(folder)
    derivations = {}
    if bundle.graph is not None:
        goal = graph_from_json(bundle.graph)
        derivations = {d.digest: d for d in topological(goal)}
    with store.lease(f"import of {bundle.object[65:]}") as lease:
        substituter = Substituter(store, [FolderCache(folder)], Trust({}), progress, report)
        if not substituter.pull(bundle.object, lease):
            raise StoreCorrupt(
                f"{folder} does not hold all of {bundle.object[65:]}",
                remedy="export it again: an interrupted export resumes",
            )
        for record in bundle.records:
            if store.realisation_record(record.resolved_key) is None:
                store.record(record, derivations.get(record.derivation), object_elsewhere=True)
        store.add_root("imported", bundle.object, bundle.object, f"imported from {folder}")
    return bundle


def _history(store: Store, name: str) -> tuple[list[Realisation], Json]:
    """The records of an object and of the steps below it, and its derivations as a graph."""
    for record in store.realisations_of(name):
        try:
            goal = load_graph(store, record.derivation)
        except MmError:  # this one came from elsewhere, without its steps
            continue
        found = [r for d in topological(goal) for r in store.realisations_by(d.digest)]
        return found, graph_to_json(goal)
    return store.realisations_of(name), None
