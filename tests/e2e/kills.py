"""kill -9 of a program at a phase of an activation, and what is left of the installation then.

A trap catches the worker in the phase, the victim is killed, and the worker goes on. What a trap
misses runs to its end, and the case is tried again.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx2

from mmadmin.core.generations.activation import BACK_OVERLAP, BACK_SWAP, OVERLAP, SWAP
from tests.e2e.installation import CATALOG, MM, ROOT, Installation, wait_for
from tests.e2e.load import Load

MODEL = "smollm2-135m"
NAME = "kills"
"""The deployment of that model."""
CANCEL = "a cancel"
"""Instead of a victim: a person cancels."""
VICTIMS = ("worker", "panel", "broker", "supervisor", "gate")
MODES = ("overlap", "swap")
WAYS = {
    ("overlap", False): OVERLAP,
    ("overlap", True): BACK_OVERLAP,
    ("swap", False): SWAP,
    ("swap", True): BACK_SWAP,
}
POLL_S = 0.002
SETTLED_S = 300.0
ENDED = ("succeeded", "failed", "errored", "cancelled")
CUTS = ("gate", "supervisor")
"""Whose death cuts requests; that of the others may cost none."""


@dataclass(frozen=True)
class Case:
    """Whom to kill, and when."""

    victim: str
    phase: str
    mode: str
    back: bool
    """The phase belongs to the way back of a generation that fails."""

    def __str__(self) -> str:
        return f"{self.victim} at {self.phase} ({self.mode}{', back' if self.back else ''})"


def cases(
    victims: Sequence[str] = VICTIMS, modes: Sequence[str] = MODES, phases: Sequence[str] = ()
) -> Iterator[Case]:
    """Every victim at every phase of every way."""
    for (mode, back), way in WAYS.items():
        for phase in way:
            for victim in victims:
                if mode in modes and (not phases or phase.value in phases):
                    yield Case(victim, phase.value, mode, back)


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    end: str = "missed"
    """live (the new generation), restored (the old one), or missed: the phase was never caught."""
    state: str = ""
    """How the activation ended."""
    tries: int = 0
    settled_s: float = 0.0
    """From the kill until everything stood again."""
    cut: int = 0
    """Failed requests that had to fail."""
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """An activation, read past the product."""

    id: int
    state: str
    phase: str
    attempts: int
    error: str


NOTHING = Row(0, "", "", 0, "")


class Record:
    """The installation's database, read past the product."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)

    def newest(self) -> Row:
        """The newest activation."""
        found = self._database.execute(
            "select a.id, a.state, coalesce(phase, ''), attempts, coalesce(error, '')"
            " from deployments_activation a"
            " join deployments_deployment d on d.id = a.deployment_id"
            " where d.name = ? order by a.id desc limit 1",
            (NAME,),
        ).fetchone()
        return Row(*found) if found else NOTHING

    def live(self) -> int:
        """The live generation's number, 0 = none."""
        found = self._database.execute(
            "select g.number from deployments_deployment d"
            " join deployments_generation g on g.id = d.live_id where d.name = ?",
            (NAME,),
        ).fetchone()
        return int(found[0]) if found else 0

    def half_way(self) -> list[str]:
        """Whatever the records call unfinished."""
        ask = self._database.execute
        return [
            *(
                f"generation {number} is {state}"
                for number, state in ask(
                    "select number, state from deployments_generation"
                    " where state in ('starting', 'probing', 'draining')"
                )
            ),
            *(
                f"requests are held until {until}"
                for (until,) in ask(
                    "select hold_until from deployments_deployment where hold_until is not null"
                )
            ),
        ]

    def replicas(self) -> list[tuple[str, int, str, int | None]]:
        """uid, generation, state and pid of each replica that the records call running."""
        return self._database.execute(
            "select r.uid, g.number, r.state, r.pid from deployments_replica r"
            " join deployments_generation g on g.id = r.generation_id"
            " join deployments_deployment d on d.id = g.deployment_id"
            " where r.state in ('starting', 'probing', 'ready', 'draining') and d.name = ?",
            (NAME,),
        ).fetchall()


class Trap(Protocol):
    """How the worker is caught in a phase."""

    tries: int
    """How often it may miss the phase before that is a fault."""

    def laid(self, case: Case) -> AbstractContextManager[None]:
        """From before the activation begins until the victim is dead, or nothing was caught."""
        ...

    def has(self, case: Case, row: Row) -> bool:
        """Whether the worker stands in the phase, as far as can be seen; `row` was read just now."""
        ...

    def kept(self, case: Case) -> AbstractContextManager[bool]:
        """The worker goes nowhere while the block runs; False = it had gone on already."""
        ...


class Glimpse:
    """Watches the record: nothing holds a phase, and the short ones may be over too soon.

    As soon as the record names the phase, the worker is stopped (SIGSTOP), and the record is read
    again: what it says then is where the worker stands.
    """

    tries = 12

    def __init__(self, site: Installation) -> None:
        self._supervisor = site.supervisor
        self._record = Record(site.home.database)
        self._worker = 0

    @contextmanager
    def laid(self, case: Case) -> Iterator[None]:
        """Know whom to stop."""
        self._worker = self._supervisor.pid("worker") or 0
        assert self._worker
        yield

    def has(self, case: Case, row: Row) -> bool:
        """The record names the phase."""
        return row.phase == case.phase

    @contextmanager
    def kept(self, case: Case) -> Iterator[bool]:
        """The worker is stopped, and its pool, which is in its group."""
        os.killpg(self._worker, signal.SIGSTOP)
        try:
            row = self._record.newest()
            yield row.phase == case.phase and row.state not in ENDED
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._worker, signal.SIGCONT)


@contextmanager
def town_in(
    site: Installation, folder: Path, modes: Sequence[str], trap: Trap, *, clients: int
) -> Iterator[Town]:
    """The generations of these modes, one live, under a load that ends with the block."""
    town = Town(site, Load(site.gate, site.key(), NAME), folder, trap)
    for mode in modes:
        town.prepare(mode)
    site.answered(town.load.key, NAME)
    with town.load.running(clients):
        yield town


class Town:
    """One installation in which programs are killed."""

    def __init__(self, site: Installation, load: Load, folder: Path, trap: Trap) -> None:
        self.site = site
        self.load = load
        self.trap = trap
        self.record = Record(site.home.database)
        self._folder = folder
        self._good: dict[str, tuple[int, int]] = {}
        self._bad: dict[str, int] = {}

    def prepare(self, mode: str) -> None:
        """Two generations that take turns in this mode, proved, and one that will not start."""
        first, second = (self._deploy(mode, temperature=t) for t in ("0.2", "0.3"))
        self._bad[mode] = self._deploy(mode, temperature="0.4", fails=True)
        self._good[mode] = first, second
        for number in (first, second):
            self._activate(number)

    def _deploy(self, mode: str, *, temperature: str, fails: bool = False) -> int:
        text = (CATALOG / f"{MODEL}.toml").read_text(encoding="utf-8")
        text = text.replace(f'name = "{MODEL}"', f'name = "{NAME}"')
        text = text.replace("temperature = 0.2", f"temperature = {temperature}")
        text += f'\n[activation]\nmode = "{mode}"\ndrain_timeout_s = 60\nauto_rollback = false\n'
        if fails:  # the engine ends as soon as it reads this
            text += '[serve.flags]\nnuma = "nonsense"\n'
        path = self._folder / f"{mode}-{temperature}.toml"
        path.write_text(text, encoding="utf-8")
        spec = [str(path), "--no-activate", "--reason", "kills"]
        return int(self.site.json("deploy", *spec)["number"])

    def other(self, mode: str) -> int:
        """The good generation of the mode that is not live."""
        first, second = self._good[mode]
        return second if self.record.live() == first else first

    # --- one case

    def run(self, case: Case) -> Outcome:
        """Kill, wait until all has settled, and look; then activate once more, undisturbed."""
        outcome = Outcome(case)
        try:
            self._run(case, outcome)
        except AssertionError as error:
            outcome.faults.append(str(error))
        return outcome

    def _run(self, case: Case, outcome: Outcome) -> None:
        if self.record.live() not in self._good[case.mode]:
            self._activate(self.other(case.mode))
        struck = 0.0
        while not struck and outcome.tries < self.trap.tries:
            outcome.tries += 1
            old = self.record.live()
            target = self._bad[case.mode] if case.back else self.other(case.mode)
            began = time.monotonic()
            struck = self._strike(case, target)
        if not struck:
            outcome.faults.append(f"{case.phase} was never caught in {outcome.tries} tries")
            return
        faults = self._settle()
        settled = time.monotonic()
        outcome.settled_s = settled - struck
        outcome.state = self.record.newest().state
        outcome.faults += faults
        outcome.faults += self._judge_end(case, outcome, old, target)
        outcome.faults += self._judge_requests(case, outcome, began, struck, settled)
        if not outcome.faults:
            outcome.faults += self._once_more(case)

    def _strike(self, case: Case, target: int) -> float:
        """Activate, and kill the victim in the phase; when that was, 0 = it was over too soon."""
        before = self.record.newest().id
        blow = self._blow(case.victim)
        with self.trap.laid(case), self._click(target) as click:
            struck = self._wait_and_strike(blow, case, before, click)
        self._wait_ended(before)
        return struck

    def _blow(self, victim: str) -> Callable[[], object]:
        """What is done to the activation when it is caught."""
        if victim == CANCEL:
            return lambda: self.site.run("cancel", NAME)
        control = self.site.supervisor
        pid = control.pid_of_daemon() if victim == "supervisor" else control.pid(victim)
        assert pid
        return lambda: os.kill(pid, signal.SIGKILL)

    def _wait_and_strike(
        self, blow: Callable[[], object], case: Case, before: int, click: subprocess.Popen[bytes]
    ) -> float:
        while not self.trap.has(case, row := self._under_way(before)):
            if row.state in ENDED:
                return 0.0
            if click.poll():
                raise AssertionError(f"mm activate: {click.communicate()[0]!r}")
            time.sleep(POLL_S)
        with self.trap.kept(case) as kept:
            if not kept:
                return 0.0
            struck = time.monotonic()
            blow()
        return struck

    def _under_way(self, before: int) -> Row:
        """The activation that has just been asked for; a row without a phase before it is there."""
        row = self.record.newest()
        return row if row.id > before else NOTHING

    def _click(self, target: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*MM, "activate", NAME, str(target), "--reason", "kills", "--detach"],
            cwd=ROOT,
            env=self.site.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _wait_ended(self, before: int) -> None:
        def ended() -> bool:
            row = self.record.newest()
            return row.id > before and row.state in ENDED

        wait_for("the activation's end", ended, patience_s=SETTLED_S)

    def _settle(self) -> list[str]:
        """Wait until nothing is wrong any more; what still is after a while."""
        give_up = time.monotonic() + SETTLED_S
        while (wrong := self.wrong()) and time.monotonic() < give_up:
            time.sleep(0.2)
        return wrong

    def wrong(self) -> list[str]:
        """What is not as it should be when nothing is under way: processes, records, answers."""
        site, record = self.site, self.record
        if not site.supervisor.running():
            return ["the supervisor does not run"]
        daemon = site.supervisor.pid_of_daemon()
        programs = {p.name: p for p in site.supervisor.status()}
        replicas = record.replicas()
        found = [f"{p.name} is {p.state}" for p in programs.values() if p.state not in _STANDS]
        found += record.half_way()
        engines = [name for name in programs if name.startswith(f"{NAME}.")]
        if len(engines) != 1:
            found.append(f"the supervisor has {len(engines)} engines: {engines}")
        if [r[0] for r in replicas] != engines:
            found.append(f"the records have {replicas}, the supervisor {engines}")
        for uid, number, state, pid in replicas:
            if number != record.live() or state != "ready":
                found.append(f"{uid} is {state}, live is {record.live()}")
            if uid in programs and programs[uid].pid != pid:
                found.append(f"{uid} is process {programs[uid].pid}, the records say {pid}")
        found += self._strays(daemon, len(engines))
        return found or self._answer()

    def _strays(self, daemon: int | None, engines: int) -> Iterator[str]:
        """Processes of this installation that are nobody's, and engines too many.

        An engine counts by its launcher; what runs in its sandbox descends from that.
        """
        servers = 0
        for process in self.site.processes():
            try:
                is_ours = process.environ()["SUPERVISOR_PROCESS_NAME"].startswith(f"{NAME}.")
                servers += is_ours and process.ppid() == daemon
                line = [process.pid, *(parent.pid for parent in process.parents())]
                if daemon not in line:
                    yield f"{process.name()} (pid {process.pid}) is nobody's child"
            except Exception as error:  # noqa: BLE001
                yield f"a process ended just now: {error}"
        if servers != engines:
            yield f"{servers} engines run, {engines} should"

    def _answer(self) -> list[str]:
        """A request through the gate is answered by the live generation."""
        try:
            answer = self.site.ask(self.load.key, NAME)
        except httpx2.HTTPError as error:
            return [f"the gate does not answer: {error}"]
        if answer.status_code != httpx2.codes.OK:
            return [f"the gate answers {answer.status_code}: {answer.text[:200]}"]
        said, live = answer.headers["x-mm-generation"], f"{NAME}/{self.record.live()}"
        return [] if said == live else [f"{said} answers, live is {live}"]

    def _judge_end(self, case: Case, outcome: Outcome, old: int, target: int) -> Iterator[str]:
        live = self.record.live()
        row = self.record.newest()
        forward = not case.back and case.victim != CANCEL
        if live == target and row.state == "succeeded" and forward:
            outcome.end = "live"
        elif live == old and row.state == ("cancelled" if case.victim == CANCEL else "failed"):
            outcome.end = "restored"
        else:
            outcome.end = "wrong"
            yield f"generation {live} is live ({old} → {target}), {row.state}: {row.error}"

    def _judge_requests(
        self, case: Case, outcome: Outcome, began: float, struck: float, settled: float
    ) -> Iterator[str]:
        """Requests may fail while a gate or the supervisor is down, and at no other moment."""
        for asked in self.load.failures(began):
            if case.victim in CUTS and asked.ended >= struck and asked.began <= settled:
                outcome.cut += 1
            else:
                yield f"a request failed: {asked.failure}"

    def _once_more(self, case: Case) -> list[str]:
        began = time.monotonic()
        self._activate(self.other(case.mode))
        wrong = self._settle()
        wrong += [f"a later request failed: {a.failure}" for a in self.load.failures(began)]
        return wrong

    def _activate(self, number: int) -> Any:
        return self.site.json("activate", NAME, str(number), "--reason", "kills")


_STANDS = ("RUNNING", "STARTING")
"""An engine is STARTING for longer than it takes to prove itself."""
