"""`mm plan`, `mm build`, `mm lock`: a deployment file against the store, without records.

Needs neither panel nor broker nor database. What was pinned the first time is kept as
`MM_HOME/locks/<name>.json`, so that a second build asks the network nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.deployments import Rehash, SpecFile, read_spec
from mmadmin.cli.hub_progress import hub_for, reporting
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, seconds_text
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import MmError
from mmadmin.core.generations.lifecycle import waiting_message
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mmadmin.core.build.builder import StepTools
    from mmadmin.core.build.derivation import Derivation
    from mmadmin.core.build.planner import Plan
    from mmadmin.core.build.rebuild import Check
    from mmadmin.core.spec.lock import Lock
    from mmadmin.core.spec.spec import Spec
    from mmadmin.core.store import Staging, Store, StoreObject


SAY_EVERY_S = 10.0
MARKS = {
    "cached": "[dim]=[/]",
    "build": "[cyan]+[/]",
    "fetch": "[cyan]↓[/]",
    "substitute": "[cyan]⇣[/]",
}


def lock_file(home: Home, name: str) -> Path:
    """Where `mm build` keeps what a deployment's moving parts were pinned to."""
    return home.root / "locks" / f"{name}.json"


def forget_digests(spec: Spec, home: Home) -> None:
    """Have the files of this host that a spec names read again, even if they look unchanged."""
    from mmadmin.core.spec.questions import local_files
    from mmadmin.host.known_digests import KnownDigests

    KnownDigests(home.digests).forget(local_files(spec))


def locked(
    spec: Spec,
    home: Home,
    *,
    refresh: tuple[Any, ...] = (),
    rehash: bool = False,
    quiet: bool = False,
) -> Lock:
    """The spec's lock: what is pinned already is kept, unless it is in `refresh`."""
    from mmadmin.core.spec.lock import lock_as_json, lock_from_json
    from mmadmin.core.spec.questions import questions, reads_this_host

    if rehash:
        forget_digests(spec, home)
    path = lock_file(home, spec.name)
    previous = None
    if path.exists():
        previous = lock_from_json(json.loads(path.read_text(encoding="utf-8")))
        unmoved = previous.asked == questions(spec) and not refresh
        if unmoved and not reads_this_host(spec):
            return previous

    from mmadmin.host.known_digests import KnownDigests
    from mmadmin.host.resolve import Sources, resolve
    from mmadmin.host.source_guard import Guard

    with reporting(f"pinning what moves in {spec.name}", quiet=quiet) as say:
        guard = Guard(home=home)
        sources = Sources(hub=hub_for(say), digests=KnownDigests(home.digests), guard=guard)
        lock = resolve(spec, previous, sources=sources, refresh=refresh, on_progress=say)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(json.dumps(lock_as_json(lock), indent=1), encoding="utf-8")
    fresh.replace(path)
    return lock


def goal_of(spec: Spec, lock: Lock, home: Home) -> Derivation:
    """The system's derivation for this machine."""
    from mmadmin.core.spec.assemble import assemble
    from mmadmin.host.facts import host_facts
    from mmadmin.host.fit import check_engine

    home.store.mkdir(parents=True, exist_ok=True)
    facts = host_facts(home.store)
    check_engine(spec, facts)
    return assemble(spec, lock, facts)


def plan(file: SpecFile, *, rehash: Rehash = False, as_json: JsonFlag = False) -> None:
    """Say what a deployment file would fetch and build here, and why. Changes nothing.

    Example: mm plan deployments/catalog/smollm2-135m.toml
    """
    from mmadmin.core.build.planner import plan as plan_of
    from mmadmin.core.spec.spec import parse_spec
    from mmadmin.core.store import Store

    home = Home.from_env()
    spec = parse_spec(read_spec(file))
    lock = locked(spec, home, rehash=rehash, quiet=as_json)
    from mmadmin.host.binary_caches import configured_substituter

    goal, store = goal_of(spec, lock, home), Store(home.store)
    planned = plan_of(goal, store, elsewhere=configured_substituter(home, store))
    if as_json:
        emit_json({"name": spec.name} | planned.as_json())
        return
    _show_plan(planned)
    if written := planned.written_bytes:
        free = store.usable_bytes()
        console.print(
            f"{bytes_text(written)} are written at least, of {bytes_text(free)} that may be used"
            f" ({bytes_text(store.disk.floor_bytes)} stay free)"
            + ("" if written <= free else f": [red]{bytes_text(written - free)} short[/]")
        )


def _show_plan(planned: Plan) -> None:
    table(
        [
            Column("", whole=True),
            Column("step", whole=True),
            Column("of what"),
            Column("size", whole=True, right=True),
            Column("why"),
        ],
        [
            [
                MARKS[step.action],
                f"[bold]{escape(step.derivation.recipe)}[/]",
                escape(step.derivation.name),
                bytes_text(step.size_bytes) if step.size_bytes else "",
                escape(step.why),
            ]
            for step in planned.steps
        ],
        empty="nothing to do",
    )
    had = planned.count("substitute")
    console.print(
        f"\n{planned.count('cached')} in the store, {planned.count('build')} to build, "
        f"{planned.count('fetch')} to fetch ({bytes_text(planned.fetch_bytes)})"
        + (f", {had} from a binary cache" if had else "")
    )


@dataclass(slots=True)
class Watcher:
    """The builder's observer: a line for each step, a bar for the one that runs."""

    quiet: bool
    bar: Progress | None = None
    task: TaskID | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    said_at: float = 0.0
    waits_for: tuple[str, str] = ("", "")

    def _line(self, mark: str, derivation: Derivation, words: str) -> None:
        if not self.quiet:
            name = f"[bold]{escape(derivation.recipe)}[/] {escape(derivation.name)}"
            console.print(f"{mark} {name}  [dim]{escape(words)}[/]")

    def _note(self, derivation: Derivation, state: str, **more: Any) -> None:
        self.steps.append(
            {
                "name": derivation.name,
                "recipe": derivation.recipe,
                "derivation": derivation.digest,
                "state": state,
                **more,
            }
        )

    def step_started(self, derivation: Derivation, why: str) -> None:
        """Say what begins and why."""
        self._end_bar()
        self._line("[cyan]▸[/]", derivation, why)
        if self.bar is not None:
            self.task = self.bar.add_task(derivation.label, total=None, words="")

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Say once who makes the same; Ctrl-C ends the wait."""
        if self.waits_for != (derivation.digest, holder):
            self.waits_for = (derivation.digest, holder)
            self._line("[dim]·[/]", derivation, waiting_message(holder))

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """Say what was there."""
        self._end_bar()
        self._line("[dim]=[/]", derivation, "in the store")
        self._note(derivation, "cached", output=found.name)

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:
        """Say what is done and how long it took."""
        self._end_bar()
        self._line("[green]✓[/]", derivation, seconds_text(seconds))
        self._note(derivation, "built", output=found.name, seconds=round(seconds, 3))

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """Say which step it was; the error itself goes on."""
        self._end_bar()
        said = error.message if isinstance(error, MmError) else str(error)
        self._line("[red]✗[/]", derivation, said.splitlines()[0] if said else "")
        self._note(derivation, "failed")

    def step_compared(self, derivation: Derivation, outcome: str, words: str) -> None:
        """Say how a rebuilt step compares with what is in the store."""
        self._end_bar()
        mark = {"match": "[green]✓[/]", "mismatch": "[red]✗[/]"}.get(outcome, "[yellow]?[/]")
        self._line(mark, derivation, f"{outcome}: {words}")

    def _end_bar(self) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.remove_task(self.task)
            self.task = None

    def progress(self, done: int, total: int, unit: str) -> None:
        """Show how far the running step is."""
        in_bytes = unit in {"B", "bytes"}
        words = (
            f"{bytes_text(done)} of {bytes_text(total)}"
            if in_bytes
            else f"{done} of {total} {unit}"
        )
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done, total=total or None, words=words)
        elif not self.quiet and time.monotonic() - self.said_at >= SAY_EVERY_S:
            self.said_at = time.monotonic()
            console.print(f"    {words}")


def tools_of(
    home: Home, progress: Callable[[int, int, str], None]
) -> Callable[[Derivation, Staging, Path], StepTools]:
    """Each step's tools: its log goes to the store, its progress to `progress`."""
    from mmadmin.host.source_guard import Guard
    from mmadmin.host.toolbox import HostConfig, HostToolbox

    def tools_for(_derivation: Derivation, staging: Staging, log_path: Path) -> StepTools:
        def write(line: str) -> None:
            with log_path.open("a", encoding="utf-8", errors="replace") as file:
                print(line, file=file)

        guard = Guard(home=home)
        config = HostConfig.from_env(home.store / "downloads", hidden=[home.secrets], guard=guard)
        return HostToolbox(
            staging,
            write,
            progress,
            lambda: False,
            config=config,
        )

    return tools_for


def build(
    file: SpecFile,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Build again what is there, and compare.")
    ] = False,
    rehash: Rehash = False,
    as_json: JsonFlag = False,
) -> None:
    """Build a deployment file's system into this machine's store; deploys nothing.

    What is in the store already, or in a trusted binary cache, is not built again. Interrupt it
    and run it again: it goes on. With --check everything that was built is built once more and
    compared, to the tensor; ends with 1 on a mismatch. It never repairs.

    Example: mm build deployments/catalog/smollm2-135m.toml
    """
    from mmadmin.core.build.builder import GoalRoot, realise
    from mmadmin.core.spec.spec import parse_spec
    from mmadmin.core.store import Store
    from mmadmin.host.binary_caches import configured_substituter

    home = Home.from_env()
    spec = parse_spec(read_spec(file))
    lock = locked(spec, home, rehash=rehash, quiet=as_json)
    store = Store(home.store)
    goal = goal_of(spec, lock, home)
    with watching(quiet=as_json) as watcher:
        if check:
            checks = list(_rebuilt(goal, store, home, watcher))
        else:
            root = GoalRoot("build", spec.name, f"last built by mm build {file}")
            tools = tools_of(home, watcher.progress)
            done = realise(
                goal,
                store,
                tools,
                watcher,
                root=root,
                substituter=configured_substituter(home, store),
                owner=f"mm build of {spec.name}",
            )
    if check:
        _show_checks(spec.name, checks, as_json=as_json)
        return
    path = store.object_path(done.object)
    if as_json:
        emit_json(
            {
                "name": spec.name,
                "system": done.object,
                "path": str(path),
                "derivation": goal.digest,
                "steps": watcher.steps,
            }
        )
    else:
        console.print(f"\n[bold]{escape(str(path))}[/]", soft_wrap=True)


@contextmanager
def watching(*, quiet: bool) -> Iterator[Watcher]:
    """A watcher with a bar on a terminal, with lines elsewhere."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if quiet or not console.is_terminal:
        yield Watcher(quiet=quiet)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Watcher(quiet=False, bar=bar)


def _rebuilt(goal: Derivation, store: Store, home: Home, watcher: Watcher) -> Iterator[Check]:
    """Every step that is not pinned, built again and compared."""
    from mmadmin.core import catalog
    from mmadmin.core.build.derivation import thawed, topological
    from mmadmin.core.build.rebuild import check as check_step

    for derivation in topological(goal):
        params = thawed(derivation.params)
        if catalog.recipe(derivation.recipe).fixed_output(params) is not None:
            continue
        watcher.step_started(derivation, "again, to compare")
        found = check_step(derivation, store, tools_of(home, watcher.progress))
        watcher.step_compared(derivation, found.outcome, found.message)
        yield found


def _show_checks(name: str, checks: list[Check], *, as_json: bool) -> None:
    wrong = [found for found in checks if found.outcome == "mismatch"]
    if as_json:
        emit_json({"name": name, "checks": [found.as_json() for found in checks]})
    else:
        for found in wrong:
            console.print(f"\n[red]{escape(found.object)}[/] is kept beside {found.rebuilt}")
            for difference in found.differences:
                console.print(f"  {escape(str(difference.path))}: {escape(difference.message)}")
        console.print(f"\n{len(checks) - len(wrong)} of {len(checks)} steps came out as before")
    if wrong:
        raise typer.Exit(1)


def lock(
    file: SpecFile,
    *,
    update: Annotated[bool, typer.Option("--update", help="Ask again what moves.")] = False,
    only: Annotated[str, typer.Option(help="With --update: only source, engine or template.")] = "",
    rehash: Rehash = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a deployment file's moving parts are pinned to; with --update, pin them again.

    Example: mm lock deployments/catalog/mistral-medium-3.5-v100.toml --update --only source
    """
    from mmadmin.core.canonical import parse
    from mmadmin.core.spec.lock import lock_as_json
    from mmadmin.core.spec.spec import parse_spec

    home = Home.from_env()
    spec = parse_spec(read_spec(file))
    parts = {"source": "model", "model": "model", "engine": "engine", "template": "template"}
    if only and only not in parts:
        raise typer.BadParameter("use source, engine or template", param_hint="--only")
    wanted = (parts[only],) if only else ("model", "engine", "template")
    path = lock_file(home, spec.name)
    before = parse(path.read_bytes()) if path.exists() else None
    refresh = wanted if update else ()
    found = locked(spec, home, refresh=refresh, rehash=rehash, quiet=as_json)
    changed = before is not None and before != json.loads(path.read_text(encoding="utf-8"))
    if as_json:
        emit_json({"name": spec.name, "changed": changed, "lock": lock_as_json(found)})
        return
    table(
        [
            Column("file"),
            Column("size", whole=True, right=True),
            Column("sha256", whole=True, drop=2),
            Column("from", drop=1),
        ],
        [
            [
                escape(locked_file.path),
                bytes_text(locked_file.size),
                locked_file.sha256[:16],
                escape(_where(locked_file.source)),
            ]
            for locked_file in found.files
        ],
        empty="nothing is pinned",
    )
    if update:
        console.print("\nchanged" if changed else "\nnothing has moved")


def _where(source: Any) -> str:
    for name in ("repo", "project", "url", "path"):
        if value := getattr(source, name, ""):
            version = getattr(source, "revision", "") or getattr(source, "version", "")
            return f"{value}@{version[:12]}" if version else str(value)
    return ""
