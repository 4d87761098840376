"""`mm deploy`, `activate`, `rollback` and their kin: the panel's actions, typed.

Each command calls one action or query and then, unless told to detach, watches the job that the
action started until it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.completion import deployment_names
from mmadmin.cli.output import (
    JsonFlag,
    console,
    emit_json,
    errors,
    escape,
    seconds_text,
    styled,
)
from mmadmin.cli.records import MOST, actor, on_host
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from deployments.models import Activation, Build, User
    from deployments.queries import DeploymentRow

Name = Annotated[
    str,
    typer.Argument(help="The deployment's name.", metavar="NAME", autocompletion=deployment_names),
]
Number = Annotated[
    int, typer.Argument(help="The generation's number.", metavar="NUMBER", min=1, max=MOST)
]
SpecFile = Annotated[
    Path, typer.Argument(help="A deployment file (TOML); - reads stdin.", metavar="FILE")
]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; kept in the history.")]
OneBuild = Annotated[
    int | None,
    typer.Option("--build", help="This build of it.", metavar="NUMBER", min=1, max=MOST),
]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")]
Rehash = Annotated[
    bool,
    typer.Option("--rehash", help="Read local files again, even if size and times did not change."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")]


def read_spec(path: Path) -> str:
    """A deployment file's text; `NotFound` names a file that does not exist."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(
            f"there is not a file {path}", remedy="the catalog is in deployments/catalog/"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Say on Ctrl-C that only the watching ends, not the work."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(
            f"\n[yellow]no longer watching[/]; {what} goes on. "
            "Watch again: mm follow NAME. End it: mm cancel NAME"
        )
        raise


def deploy(
    file: SpecFile,
    *,
    reason: Reason = "",
    activate: Annotated[
        bool, typer.Option(help="Make it live once it is built and has proved itself.")
    ] = True,
    rehash: Rehash = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Make the next generation of a deployment: build it, prove it, serve it.

    Only what changed is built. The generation that is live serves on until the new one has passed
    its probes.

    Example: mm deploy deployments/catalog/smollm2-135m.toml --reason "first try"
    """
    person = actor()
    from deployments import actions, queries
    from mmadmin.cli.follow import follow_to_live

    text = read_spec(file)
    if rehash:
        from mmadmin.cli.build import forget_digests
        from mmadmin.core.spec.spec import parse_spec

        forget_digests(parse_spec(text), Home.from_env())
    generation = actions.deploy(person, text, reason=reason, activate=activate, on_host=on_host())
    build = generation.builds.order_by("-id")[0]
    if not as_json:
        console.print(f"[bold]{escape(generation.uid)}[/]: build {build.pk}")
    if not detach:
        with going_on(f"build {build.pk}"):
            follow_to_live(build.pk, quiet=as_json)
    generation.refresh_from_db()
    if as_json:
        from deployments import schemas as s

        found = s.BuildOut.from_orm(queries.build(person, build.pk))
        emit_json(s.GenerationOut.from_orm(generation).dict() | {"build": found})
    elif not detach:
        console.print(f"[bold]{escape(generation.uid)}[/] is {styled(str(generation.state))}")


def _run_activation(activation: Activation, *, detach: bool, as_json: bool) -> None:
    from mmadmin.cli.follow import follow_activation

    if not detach:
        with going_on(f"activation {activation.pk}"):
            follow_activation(activation.pk, quiet=as_json)
        activation.refresh_from_db()
    if as_json:
        from deployments import schemas as s

        emit_json(s.ActivationOut.from_orm(activation))
        return
    what = activation.target.uid if activation.target else activation.deployment.name
    word = "queued" if detach else "stopped" if activation.target is None else "live"
    console.print(f"[bold]{escape(what)}[/] is {styled(word)}")


def activate(
    name: Name,
    number: Number,
    *,
    reason: Reason = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a built generation live; with --dry-run say whether it overlaps, and who waits.

    Example: mm activate smollm2-135m 2 --reason "evaluated well"
    """
    person = actor()
    from deployments import actions

    if dry_run:
        _say_preview(person, name, number, as_json=as_json)
        return
    activation = actions.activate(person, name, number, reason=reason)
    _run_activation(activation, detach=detach, as_json=as_json)


def rollback(
    name: Name,
    *,
    reason: Annotated[
        str,
        typer.Option("--reason", "-m", help="Why, which a roll-back needs; kept in the history."),
    ] = "",
    to: Annotated[
        int | None,
        typer.Option("--to", help="Which generation; else the last one before.", min=1, max=MOST),
    ] = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring an earlier generation back: same bytes, no network, no rebuild.

    With --dry-run only says which one, whether it overlaps, and who waits.

    Example: mm rollback smollm2-135m --reason "answers got worse"
    """
    person = actor()
    from deployments import actions

    if dry_run:
        _say_preview(person, name, to, as_json=as_json)
        return
    if not reason.strip():
        raise typer.BadParameter("a roll-back needs one: say why", param_hint="'--reason'")
    activation = actions.rollback(person, name, to=to, reason=reason)
    _run_activation(activation, detach=detach, as_json=as_json)


def _say_preview(person: User, name: str, number: int | None, *, as_json: bool) -> None:
    """What making a generation live would do (without a number, a roll-back); does nothing."""
    from deployments import queries

    found = queries.preview(person, name, number)
    outcome = found.outcome
    if as_json:
        from deployments import schemas as s

        emit_json(s.PreviewOut.of(found))
        return
    console.print(f"[bold]{escape(found.target.uid)}[/]: {styled(outcome.outlook)}")
    console.print(escape(f"{outcome.message[0].upper()}{outcome.message[1:]}."))
    if outcome.devices:
        console.print(f"It sits on GPU {', '.join(map(str, outcome.devices))}.")
    how = "measured at its first start" if outcome.load.measured else "estimated from its size"
    loading = f"loading takes about {seconds_text(outcome.load.seconds)} ({how})"
    if outcome.outlook == "refused":
        return
    if found.renames:
        console.print(f"Clients must call it {escape(found.public_name)} from then on.")
    if outcome.outlook == "swap":
        console.print(
            f"New requests wait for that long: {loading}; before it running ones may go on for "
            f"{seconds_text(outcome.drain_s)} at most."
        )
    elif outcome.ends and outcome.outlook == "overlap":
        console.print(f"No request waits; {loading}.")
    else:
        console.print(f"{loading[0].upper()}{loading[1:]}.")
    if outcome.build_first is None:
        console.print("Its host checks whether it still has every object.")
    else:
        console.print("Nothing is downloaded or built.")


def stop(
    name: Name, *, reason: Reason = "", detach: Detach = False, as_json: JsonFlag = False
) -> None:
    """Take a deployment's live generation down.

    Example: mm stop smollm2-135m --reason "the GPUs are needed"
    """
    person = actor()
    from deployments import actions

    activation = actions.stop(person, name, reason=reason)
    _run_activation(activation, detach=detach, as_json=as_json)


def list_(
    *,
    archived: Annotated[
        bool, typer.Option("--archived", help="Those that were archived instead.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the deployments: state, live and newest generation, host.

    Example: mm list
    """
    person = actor()
    from deployments import queries

    rows = queries.deployments_overview(person, archived=archived)
    if as_json:
        from deployments import schemas as s

        emit_json([s.DeploymentOut.of(row) for row in rows])
        return
    table(
        [
            Column("deployment", whole=True),
            Column("model name", drop=2),
            Column("state", whole=True),
            Column("live", whole=True, right=True),
            Column("newest", whole=True, right=True, drop=3),
            Column("host", drop=1),
        ],
        [
            [
                escape(row.deployment.name),
                escape(row.deployment.public_name),
                styled(row.state),
                str(row.live.number) if row.live else "-",
                str(row.newest.number) if row.newest else "-",
                escape(row.deployment.host.name),
            ]
            for row in rows
        ],
        empty="nothing is archived" if archived else "no deployments",
    )


def archive(
    name: Name,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Take it out of the archive.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put a stopped deployment out of sight; its history and keys stay.

    Example: mm archive smollm2-135m
    """
    person = actor()
    from deployments import actions, queries

    actions.archive(person, name, on=not undo)
    if as_json:
        from deployments import schemas as s

        emit_json(s.DeploymentOut.of(queries.deployment(person, name)))
    else:
        done = "out of the archive" if undo else "archived"
        console.print(f"[bold]{escape(name)}[/] is {done}")


def follow(name: Name, *, build: OneBuild = None, as_json: JsonFlag = False) -> None:
    """Watch what a deployment is in the middle of, to its end; of several builds, the newest.

    Example: mm follow smollm2-135m
    """
    person = actor()
    from deployments import queries
    from mmadmin.cli.follow import follow_activation, follow_to_live

    row = queries.deployment(person, name)
    wanted = _build_of(row, build)
    if wanted is not None:
        if not as_json:
            _say_others(row, wanted, "follow")
        with going_on(f"build {wanted.pk}"):
            follow_to_live(wanted.pk, quiet=as_json)
    elif row.activation is not None:
        with going_on(f"activation {row.activation.pk}"):
            follow_activation(row.activation.pk, quiet=as_json)
    elif not as_json:
        console.print(f"nothing is queued or running for {escape(name)}")
    if as_json:
        emit_json({"name": name, "state": queries.deployment(person, name).state})


def _build_of(row: DeploymentRow, number: int | None) -> Build | None:
    """The build under way that was asked for, else the newest."""
    if number is None:
        return row.build
    for build in row.builds:
        if build.pk == number:
            return build
    under_way = ", ".join(str(build.pk) for build in row.builds) or "none"
    raise NotFound(
        f"{row.deployment.name} has no build {number} under way",
        remedy=f"builds under way: {under_way}",
    )


def _say_others(row: DeploymentRow, one: Build, verb: str) -> None:
    others = [build for build in row.builds if build.pk != one.pk]
    if others:
        listed = ", ".join(f"build {build.pk} ({build.phase or build.state})" for build in others)
        it, which = ("it", others[0].pk) if len(others) == 1 else ("one", "NUMBER")
        name = escape(row.deployment.name)
        console.print(
            f"also under way: {listed}. {verb.capitalize()} {it}: mm {verb} {name} --build {which}"
        )


def cancel(name: Name, *, build: OneBuild = None, as_json: JsonFlag = False) -> None:
    """Cancel a deployment's build and activation; what was live stays live.

    Of several builds the newest is cancelled, and the others are named; --build NUMBER cancels
    that build and nothing else.

    What waits is cancelled at once. What runs is asked to stop and ends in order within seconds;
    what was done a moment before ends as it would have.

    Example: mm cancel smollm2-135m

    Example: mm cancel smollm2-135m --build 4
    """
    person = actor()
    from deployments import actions, queries

    row = queries.deployment(person, name)
    wanted = _build_of(row, build)
    activation = row.activation if build is None else None
    jobs: dict[str, Build | Activation | None] = {
        "build": wanted and actions.cancel_build(person, wanted.pk),
        "activation": activation and actions.cancel_activation(person, activation.pk),
    }
    if as_json:
        emit_json(
            {kind: job.pk if job else None for kind, job in jobs.items()}
            | {"states": {kind: str(job.state) for kind, job in jobs.items() if job}}
            | {"other_builds": [other.pk for other in row.builds if other != wanted]}
        )
        return
    if not any(jobs.values()):
        console.print(f"nothing is queued or running for {escape(name)}")
    for kind, job in jobs.items():
        if job is not None and job.state == "cancelled":
            console.print(f"{kind} {job.pk} is {styled('cancelled')}: it had not begun")
        elif job is not None:
            console.print(
                f"{kind} {job.pk} is asked to stop; its end: mm follow {escape(name)}, "
                f"or mm logs --{kind} {job.pk}"
            )
    if wanted is not None:
        _say_others(row, wanted, "cancel")
