"""Care for a host, asked for by a person: its store collected or verified, the host examined.

A collection and a verification may be begun anew at any time, so a job whose worker died is simply
done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from deployments.jobs import keep, lease
from deployments.jobs.recorder import Recorder
from deployments.models import Care, CareKind, Role, User
from mmadmin.core.store import Store
from mmadmin.core.store.gc import collect
from mmadmin.core.store.verify import verify

MOST_NAMES = 200
"""So many names of a result are kept; their number is kept whole."""


class Hands(Protocol):
    """What care does to the machine."""

    def store(self) -> Store:
        """The store of this machine."""
        ...

    def examine(self) -> list[dict[str, Any]]:
        """Every check of the doctor but the database's: name, level, fact, remedy."""
        ...


def run(recorder: Recorder[Care], hands: Hands) -> None:
    """Do it, and write down what was found."""
    recorder.check()
    kind = recorder.job.kind
    if kind == CareKind.DOCTOR:
        result: dict[str, Any] = {"checks": [*hands.examine(), _database(), _administrator()]}
    elif kind in {CareKind.VERIFY, CareKind.READ}:
        result = _verified(recorder, hands.store(), contents=kind == CareKind.READ)
    else:
        result = _collected(recorder, hands.store(), dry_run=kind == CareKind.PREVIEW)
    recorder.flush()
    lease.write(recorder.job, result=result)


def _collected(recorder: Recorder[Care], store: Store, *, dry_run: bool) -> dict[str, Any]:
    let_go = keep.renew_roots(store, dry_run=dry_run).let_go
    recorder.check()
    done = collect(
        store, dry_run=dry_run, on_wait=lambda holder: recorder.log(f"waiting for {holder}")
    )
    return {
        "freed_bytes": done.freed_bytes,
        "objects": len(done.objects),
        "names": list(done.objects[:MOST_NAMES]),
        "files": done.blobs,
        "kept_objects": done.kept_objects,
        "let_go": list(let_go[:MOST_NAMES]),
        "seconds": round(done.seconds, 3),
    }


def _verified(recorder: Recorder[Care], store: Store, *, contents: bool) -> dict[str, Any]:
    def progress(done: int, total: int) -> None:
        recorder.check()
        recorder.progress(0, done, total, "bytes")

    found = verify(store, contents=contents, progress=progress).as_json()
    damaged = found.pop("damaged")
    return found | {"damaged": damaged[:MOST_NAMES]}


def _database() -> Mapping[str, Any]:
    """The schema is that of this version; that the database answers shows in this very record."""
    executor = MigrationExecutor(connection)
    waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if waiting:
        return _row("database", "fail", f"it lacks {len(waiting)} migrations", "run `mm up`")
    return _row("database", "ok", f"{connection.vendor}, schema is current")


def _administrator() -> Mapping[str, Any]:
    count = User.objects.filter(role=Role.ADMIN, is_active=True).count()
    if count == 0:
        return _row("administrator", "fail", "there is none", "run `mm up`: it makes one")
    return _row("administrator", "ok", f"{count} active")


def _row(name: str, level: str, fact: str, remedy: str = "") -> Mapping[str, Any]:
    return {"name": name, "level": level, "fact": fact, "remedy": remedy}
