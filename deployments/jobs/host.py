"""What jobs do to their host: the two protocols that `machine.Machine` and the tests' toy fulfil.

The modules of the jobs decide and record; whatever touches disk, network, supervisor or engine goes
through one of these, so that all of it is tested without an engine. Every method may be called
again after a crash. All of them block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.models import Generation, Replica, ReportKind
from mmadmin.core.build.builder import StepTools
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json, Recipe
from mmadmin.core.engines.protocol import LaunchSpec, Seat
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.placement import Beside
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.source_policy import Access
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import ActivationSpec, Spec
from mmadmin.core.store import Staging, Store
from mmadmin.core.store.substitute import Substituter


@dataclass(frozen=True, slots=True)
class Description:
    """What is recorded of a system once it is built."""

    size_bytes: int
    """Of the closure."""
    reports: Mapping[ReportKind, Any]
    """What is known of it; a report that could not be made is left out."""


class BuildHost(Protocol):
    """What builds and host tasks do: store, network, sandbox."""

    def store(self) -> Store:
        """The store of this machine."""
        ...

    def resolve(
        self, spec: Spec, previous: Lock | None, access: Access, log: Callable[[str], None]
    ) -> Lock:
        """Pin the spec's moving parts; asks the network, keeps what the previous lock pinned."""
        ...

    def facts(self) -> HostFacts:
        """What this machine is."""
        ...

    def goal(self, spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
        """The system's derivation (`core.spec.assemble`)."""
        ...

    def recipe(self, kind: str) -> Recipe:
        """The recipe of a kind (`core.catalog`)."""
        ...

    def forecast(
        self, spec: Spec, lock: Lock, running: Sequence[Replica]
    ) -> tuple[Sequence[str], Any] | None:
        """Whether the model will fit, as messages and as data, before it is fetched.

        None where that is unknown. Raises `DoesNotFit` when it never will.
        """
        ...

    def substituter(self, store: Store, log: Callable[[str], None]) -> Substituter | None:
        """What a build asks before it builds: other hosts' stores; None where none is set up."""
        ...

    def describe(self, system: str, spec: Spec) -> Description:
        """What a built system is, for the record."""
        ...

    def toolbox(
        self,
        staging: Staging,
        log: Callable[[str], None],
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
        access: Access,
    ) -> StepTools:
        """What one build step can do to the host."""
        ...

    def offers(
        self, repo: str, revision: str, options: dict[str, Any] | None, running: Sequence[Replica]
    ) -> dict[str, Any]:
        """A hub repository's models and whether each fits here; asks the network."""
        ...

    def examine(self) -> list[dict[str, Any]]:
        """Every check of the doctor but the database's: name, level, fact, remedy."""
        ...


class EngineHost(Protocol):
    """What activations, trials and the watch do: engines, from preflight to their end."""

    def store(self) -> Store:
        """The store of this machine."""
        ...

    def preflight(self, generation: Generation) -> None:
        """Raise unless the generation's closure is intact and its engine could start here."""
        ...

    def beside(
        self, generation: Generation, running: Replica | None, gone: Sequence[Replica] = ()
    ) -> Beside:
        """Whether there is memory for it now, beside or instead of what runs.

        It is looked at as if the engines of `gone` had ended.
        """
        ...

    def gpus(self, generation: Generation) -> list[dict[str, Json]] | None:
        """The GPUs that it starts on now, each `{"index", "uuid"}`; None = the machine has none."""
        ...

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        """The command that starts a replica in that seat."""
        ...

    def start(self, replica: Replica, launch: LaunchSpec) -> str:
        """Put the engine under the supervisor, unless it runs already with this launch.

        Returns the level of its sandbox; empty = it has run since before there was one.
        """
        ...

    def prove(
        self,
        replica: Replica,
        launch: LaunchSpec,
        *,
        wanted: ActivationSpec | None,
        deadline_s: int,
        parent_report: Mapping[str, Any] | None,
        brief: bool,
        on_progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> Mapping[str, Any]:
        """Wait until the engine has proved itself; returns the probe report.

        Without `wanted` only that it is the right one and answers: it has shown the rest before.
        A `brief` report lacks the rows that decide nothing.
        """
        ...

    def ask_rest(
        self,
        replica: Replica,
        launch: LaunchSpec,
        report: Mapping[str, Any],
        *,
        may_generate: Callable[[], bool],
        on_progress: Callable[[str], None],
    ) -> Mapping[str, Any]:
        """The report with the rows that it lacks, asked of the engine while it serves."""
        ...

    def process(self, replica: Replica) -> ProcessIdentity | None:
        """The running engine's process."""
        ...

    def stop(self, replica: Replica) -> None:
        """End the engine's whole group; returns when its memory is free."""
        ...

    def alive(self, replica: Replica, launch: LaunchSpec) -> None:
        """Raise `Unreachable` unless a tiny completion comes back in time."""
        ...

    def loading(self, replica: Replica, launch: LaunchSpec) -> bool:
        """True while the engine loads its model, for as long as that may take."""
        ...

    def work(self, replica: Replica, launch: LaunchSpec) -> str | None:
        """A mark of how far the engine's requests are; empty = none is in work, None = unknown.

        Raises `Unreachable` without an answer.
        """
        ...

    def drift(self, replica: Replica, launch: LaunchSpec) -> Mapping[str, str]:
        """What differs between the running engine and its plan: subject → words."""
        ...
