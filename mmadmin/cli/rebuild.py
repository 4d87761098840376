"""`mm rebuild`: a generation's objects once more, from what was recorded of it.

From the records of this installation its host's worker does it; from an exported history `mm`
itself, into this machine's store, which may be empty: binary caches are asked first, sources are
fetched by their digests, and the output must be the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.build import tools_of, watching
from mmadmin.cli.deployments import Detach, going_on
from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.records import MOST, actor, on_host
from mmadmin.core.errors import (
    DigestMismatch,
    InvalidInput,
    NotFound,
    StoreCorrupt,
    Unreachable,
)
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from deployments.models import Build
    from mmadmin.core.generations.history_file import RecordedGeneration


SERVED_S = 3600.0
"""What a large model may take to load."""
POLL_S = 0.5


def rebuild(
    which: Annotated[
        str, typer.Argument(help="A deployment, or an exported history.", metavar="NAME|FILE")
    ] = "",
    number: Annotated[
        int, typer.Argument(help="The generation's number.", metavar="NUMBER", min=0, max=MOST)
    ] = 0,
    *,
    live: Annotated[
        bool,
        typer.Option("--live", help="Every live generation of this host that is not whole."),
    ] = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a generation's objects again from its record: the same hashes, or an error.

    For a generation whose objects were collected or damaged, or from an exported history on another
    machine, whose store may be empty. Binary caches are asked first; otherwise its pinned sources
    are fetched and its steps run again. Its place in the history does not change.

    With --live, after a restore or the loss of the store: makes each live generation again that
    lacks objects or has damaged ones, and waits until its engine serves.

    Example: mm rebuild smollm2-135m 1
    """
    if live == bool(which) or bool(which) != bool(number):
        raise InvalidInput(
            "it is not clear what to rebuild",
            remedy="give a deployment and a number, or --live alone",
        )
    if live:
        _live(detach=detach, as_json=as_json)
        return
    path = Path(which)
    if path.is_file():
        if detach:
            raise InvalidInput(
                "a history is rebuilt here and now", remedy="leave --detach out, or use nohup"
            )
        _from_history(read_history(path, number), path, as_json=as_json)
        return
    if path.suffix or len(path.parts) > 1:  # no deployment is called so
        raise NotFound(
            f"there is not a file {which}",
            remedy="give a deployment's name, or what `mm history NAME --export FILE` wrote",
        )
    _from_records(which, number, detach=detach, as_json=as_json)


def _live(*, detach: bool, as_json: bool) -> None:
    """Rebuild what is live and not whole, and wait until it serves."""
    person = actor()
    from deployments import actions
    from deployments.jobs.hosts import live_generations
    from mmadmin.cli.follow import follow_build
    from mmadmin.core.store import Store
    from mmadmin.core.store.verify import require_intact

    store = Store(Home.from_env().store)
    builds: list[Build] = []
    for generation in live_generations():
        try:
            require_intact(store, generation.system)
        except StoreCorrupt:
            name, number = generation.deployment.name, generation.number
            builds.append(actions.rebuild(person, name, number, on_host=on_host()))
    for build in builds if not detach else ():
        with going_on(f"build {build.pk}"):
            follow_build(build.pk, quiet=as_json)
            _wait_until_served(build, quiet=as_json)
    if as_json:
        uids = [build.generation.uid for build in builds if build.generation]
        emit_json({"builds": [build.pk for build in builds], "generations": uids})
    elif not builds:
        console.print("everything live is intact")


def _wait_until_served(build: Build, *, quiet: bool) -> None:
    """Return once the engine of the rebuilt generation has proved itself."""
    from deployments.models import Alarm, AlarmKind, Replica, ReplicaState

    generation = build.generation
    if generation is None:
        return
    if not quiet:
        console.print(f"  starting the engine of {escape(generation.uid)} …")
    give_up = time.monotonic() + SERVED_S
    ready = Replica.objects.filter(generation=generation, state=ReplicaState.READY, trial=None)
    told = Alarm.objects.filter(generation=generation, kind=AlarmKind.BYTES, cleared_at=None)
    while told.exists() or not ready.exists():
        if time.monotonic() > give_up:
            raise Unreachable(
                f"the engine of {generation.uid} does not serve yet",
                remedy="see `mm status` and `mm logs`; the watch keeps trying",
            )
        time.sleep(POLL_S)
    if not quiet:
        console.print(f"[bold]{escape(generation.uid)}[/] is live")


def read_history(path: Path, number: int) -> RecordedGeneration:
    """A generation of an exported history."""
    from mmadmin.core.generations.history_file import recorded_generation

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    return recorded_generation(text, number, str(path))


def _from_records(name: str, number: int, *, detach: bool, as_json: bool) -> None:
    person = actor()
    from deployments import actions
    from mmadmin.cli.follow import follow_build

    build: Build = actions.rebuild(person, name, number, on_host=on_host())
    if not detach:
        with going_on(f"build {build.pk}"):
            follow_build(build.pk, quiet=as_json)
        build.refresh_from_db()
    system = build.generation.system if build.generation else ""
    if as_json:
        emit_json({"build": build.pk, "state": build.state, "system": system})
    elif not detach:
        console.print(f"[bold]{escape(f'{name}/{number}')}[/] came out as before: {system}")
    else:
        console.print(f"build {build.pk} is queued; watch it: mm follow {escape(name)}")


def _from_history(recorded: RecordedGeneration, path: Path, *, as_json: bool) -> None:
    from mmadmin.core.build.builder import GoalRoot, realise
    from mmadmin.core.generations.history_file import ELSEWHERE, only_the_same
    from mmadmin.core.store import Store
    from mmadmin.host.binary_caches import configured_substituter

    home = Home.from_env()
    home.store.mkdir(parents=True, exist_ok=True)
    store = Store(home.store)
    root = GoalRoot("build", recorded.uid, f"made again by mm rebuild {path} {recorded.number}")
    with watching(quiet=as_json) as watcher:
        tools = tools_of(home, watcher.progress)
        with only_the_same():
            done = realise(
                recorded.goal,
                store,
                tools,
                watcher,
                root=root,
                substituter=configured_substituter(home, store),
                owner=f"mm rebuild of {recorded.uid}",
            )
    if done.object != recorded.system:
        raise DigestMismatch(
            f"{recorded.uid} came out as {done.object} instead of {recorded.system}",
            remedy=f"a step does not make the same bytes on this machine: {ELSEWHERE}",
            expected=recorded.system,
            actual=done.object,
        )
    if as_json:
        emit_json(
            {
                "generation": recorded.uid,
                "system": done.object,
                "path": str(store.object_path(done.object)),
                "steps": watcher.steps,
            }
        )
        return
    console.print(f"\n[bold]{escape(recorded.uid)}[/] came out as before: {done.object}")
    console.print(
        f"[dim]to serve it here: mm import {escape(str(path))} --generation {recorded.number}[/]"
    )
