"""Small pieces of work on a host, asked for by a person: one function a kind.

A kind is a member of `TaskKind` and a function here, which gets the task's recorder and the host
and returns the task's result. Each may be started again at any time, so a task whose worker died is
simply done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from deployments.jobs import lease, reports, retention
from deployments.jobs.host import BuildHost
from deployments.jobs.recorder import Recorder
from deployments.models import HostTask, PolicyRule, Replica, ReplicaState, Role, TaskKind, User
from mmadmin.core.errors import Conflict
from mmadmin.core.source_policy import Access
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.store.gc import collect
from mmadmin.core.store.verify import verify

MOST_NAMES = 200
"""A result lists at most this many names, and their whole number."""

Result = dict[str, Any]
Function = Callable[[Recorder[HostTask], BuildHost], Result]
FUNCTIONS: dict[TaskKind, Function] = {}


def does(*kinds: TaskKind) -> Callable[[Function], Function]:
    """The function below does tasks of these kinds."""

    def register(function: Function) -> Function:
        FUNCTIONS.update(dict.fromkeys(kinds, function))
        return function

    return register


def run(recorder: Recorder[HostTask], machine: BuildHost) -> None:
    """Do it, and write down what came of it."""
    recorder.check()
    result = FUNCTIONS[TaskKind(recorder.job.kind)](recorder, machine)
    recorder.flush()
    lease.write(recorder.job, result=result)


@does(TaskKind.HUB_SEARCH)
def search_hub(recorder: Recorder[HostTask], machine: BuildHost) -> Result:
    """Which models a repository has, and whether each fits on this host."""
    task = recorder.job
    Access(PolicyRule.policy()).check_hub(task.params["repo"], "repo")
    running = Replica.objects.filter(host=task.host, state=ReplicaState.READY)
    return machine.offers(
        task.params["repo"],
        task.params["revision"],
        task.params["options"],
        list(running.select_related("generation__deployment")),
    )


@does(TaskKind.STORE_PREVIEW, TaskKind.STORE_COLLECT)
def collect_store(recorder: Recorder[HostTask], machine: BuildHost) -> Result:
    """Let go what the retention rule no longer keeps, and free what nothing needs."""
    store = machine.store()
    dry_run = recorder.job.kind == TaskKind.STORE_PREVIEW
    let_go = retention.renew_roots(store, dry_run=dry_run).let_go
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


@does(TaskKind.STORE_VERIFY, TaskKind.STORE_VERIFY_CONTENTS)
def verify_store(recorder: Recorder[HostTask], machine: BuildHost) -> Result:
    """Whether every object is as it was sealed."""

    def progress(done: int, total: int) -> None:
        recorder.check()
        recorder.progress(0, done, total, "bytes")

    contents = recorder.job.kind == TaskKind.STORE_VERIFY_CONTENTS
    found = verify(machine.store(), contents=contents, progress=progress).as_json()
    damaged = found.pop("damaged")
    return found | {"damaged": damaged[:MOST_NAMES]}


@does(TaskKind.DOCTOR)
def examine(recorder: Recorder[HostTask], machine: BuildHost) -> Result:  # noqa: ARG001
    """The doctor's checks."""
    return {"checks": [*machine.examine(), _database(), _administrator()]}


@does(TaskKind.DESCRIBE)
def describe(recorder: Recorder[HostTask], machine: BuildHost) -> Result:
    """The reports of a built generation, made again: an earlier version may not have had them."""
    generation = recorder.job.generation
    if generation is None or not generation.system:
        raise Conflict("only a generation that was built can be described")
    described = machine.describe(generation.system, parse_spec(generation.spec_toml))
    store = machine.store()
    return {"reports": reports.write(generation, described.reports, recorder.job, store)}


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
