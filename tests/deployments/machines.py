"""A machine for tests: real store, toy recipes, engines that are rows in a file."""

# ruff: noqa: D101, D102, D103 (fakes and fixtures say by name what they do)

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from django.conf import settings

from deployments.jobs.host import Description
from deployments.models import Generation, Replica, ReportKind
from mmadmin.core.build.builder import StepTools
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import (
    FixedFile,
    HubSource,
    IndexSource,
    Json,
    Params,
    Recipe,
    Requirements,
    Toolbox,
)
from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.engines.protocol import Expectation, LaunchSpec, Seat
from mmadmin.core.errors import Cancelled, Gated, MmError, ProbeFailed, Unreachable
from mmadmin.core.fit.described_host import described_host
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.placement import (
    Beside,
    Footprint,
    choose_seat,
    everywhere,
    footprints_from_json,
    promised,
)
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.source_policy import Access
from mmadmin.core.spec.lock import Lock, LockedFile, lock_as_json, lock_from_json
from mmadmin.core.spec.spec import ActivationSpec, Spec, parse_spec
from mmadmin.core.store import Staging, Store

FACTS = HostFacts(
    arch="x86_64",
    os="linux",
    libc="glibc-2.36",
    cpu_model="test",
    cpu_features=(),
    cpu_count=2,
    memory_total_bytes=1 << 34,
    memory_available_bytes=1 << 33,
    compiler="gcc-12.2.0",
    cuda="",
)
HOSTS = Path(__file__).parents[2] / "deployments" / "hosts"
PROCESS = ProcessIdentity(1, 1, "a boot")
"""What every engine of this machine runs as."""
LOCK = Lock(
    {
        "model": (LockedFile("m.gguf", "0" * 64, 1, HubSource("acme/smol", "c" * 40, "m.gguf")),),
        "engine": (LockedFile("e.tar.gz", "1" * 64, 1, IndexSource("e", "1", "e.tar.gz")),),
    }
)


def folder() -> Path:
    """Where tests steer the machine and read what it did."""
    path = settings.HOME.root / "machine"
    path.mkdir(parents=True, exist_ok=True)
    return path


def told(name: str, default: Any = None) -> Any:
    try:
        return json.loads((folder() / name).read_text())
    except FileNotFoundError:
        return default


def tell(name: str, value: Any) -> None:
    scratch = folder() / f".{name}.{os.getpid()}"
    scratch.write_text(json.dumps(value))
    scratch.replace(folder() / name)


def note(line: str) -> None:
    """Append a line to what was done: one write, so that processes do not mix."""
    with (folder() / "done").open("a") as file:
        file.write(line + "\n")


def done() -> list[str]:
    try:
        return (folder() / "done").read_text().splitlines()
    except FileNotFoundError:
        return []


class ToyRecipe:
    """Writes its params to a file; waits while it is told to hold; fails when told to."""

    version = 1
    determinism = "bitwise"
    refers_to_inputs = True
    copies: Sequence[str] = ()

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def check(self, params: Params) -> None:
        pass

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        if self.kind not in told("pinned", []):
            return None
        content = self.content(params).encode()
        return [FixedFile("result", sha256(content).hexdigest(), len(content))]

    def content(self, params: Params) -> str:
        other = {"other": 1} if told("other") else {}
        return json.dumps({"kind": self.kind, "params": str(dict(params))} | other)

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        note(f"begin {self.kind} {os.getpid()}")
        tools.log(f"building {self.kind}")
        tools.progress(1, 2, "steps")
        (out / "half").write_text("half")
        if self.kind in told("suicide", []):
            os.kill(os.getpid(), 9)
        while self.kind in told("hold", []):
            tools.progress(1, 2, "steps")
            tools.log("still holding")
            time.sleep(0.05)
        if self.kind in told("fail", []):
            raise MmError(f"{self.kind} cannot be built", remedy="mend it")
        if self.kind in told("bug", []):
            raise ZeroDivisionError("a bug")
        (out / "half").unlink()
        (out / "result").write_text(self.content(params))
        note(f"end {self.kind} {os.getpid()}")

    def requires(self, params: Params) -> Requirements:
        return Requirements(gpus=int(self.kind in told("gpu-steps", [])))


class ToyTools:
    sandbox_level = "none"
    jobs = 1

    def __init__(self, staging: Staging, log: Any, progress: Any, cancelled: Any) -> None:
        self.staging, self._log, self._progress, self._cancelled = staging, log, progress, cancelled
        self.known: dict[str, str] = {}

    @property
    def scratch(self) -> Path:
        return self.staging.scratch

    def _check(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled")

    @contextmanager
    def holding(self, wanted: Requirements, owner: str, on_wait: Any) -> Iterator[None]:
        while wanted.gpus and told("gpu-holder"):
            self._check()
            on_wait(f"20.0 GiB of GPU 0; {told('gpu-holder')} holds 24.0 GiB")
            time.sleep(0.05)
        yield

    def log(self, line: str) -> None:
        self._check()
        self._log(line)

    def progress(self, done: int, total: int, unit: str) -> None:
        self._check()
        self._progress(done, total, unit)


class ToyMachine:
    """What jobs do to a host, without engines, network or compiler."""

    def store(self) -> Store:
        return Store(settings.HOME.store, floor_bytes=0)

    def facts(self) -> HostFacts:
        described = told("host")
        facts = FACTS if described is None else described_host(HOSTS, described)
        return replace(facts, **told("facts", {}))

    def resolve(
        self, spec: Spec, previous: Lock | None, access: Access, log: Callable[[str], None]
    ) -> Lock:
        note("resolve")
        log("locking the sources")
        if told("resolve-fails"):
            raise MmError("the hub does not answer")
        return lock_from_json(told("lock", None) or lock_as_json(LOCK))

    def goal(self, spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
        engine = Derivation("llama", "toy-engine", 1, {}, {})
        model = Derivation("smol", "toy-model", 1, {}, {})
        options = {"context": spec.serve.context, "compiler": facts.compiler}
        return Derivation("system", "toy-system", 1, options, {"engine": engine, "model": model})

    def recipe(self, kind: str) -> Recipe:
        return ToyRecipe(kind)  # type: ignore[return-value]

    def forecast(
        self, spec: Spec, lock: Lock, running: Sequence[Replica]
    ) -> tuple[Sequence[str], Any] | None:
        return told("forecast")

    def substituter(self, store: Store, log: Any) -> Any:
        return None

    def describe(self, system: str, spec: Spec) -> Description:
        reports = {
            ReportKind.COMMAND: ["engine", system],
            ReportKind.TEMPLATE: "{{ messages }}",
            ReportKind.RENDERING: told("rendering"),
            ReportKind.NEEDS: told("needs"),
        }
        return Description(42, {kind: made for kind, made in reports.items() if made is not None})

    def toolbox(
        self, staging: Staging, log: Any, progress: Any, cancelled: Any, access: Access
    ) -> StepTools:
        return ToyTools(staging, log, progress, cancelled)  # type: ignore[return-value]

    def offers(
        self, repo: str, revision: str, options: dict[str, Any] | None, running: Sequence[Replica]
    ) -> dict[str, Any]:
        if repo == "gated/model":
            raise Gated("gated/model asks for its licence", remedy="accept it on the hub")
        names = [replica.generation.uid for replica in running]
        return {"repo": repo, "commit": "0" * 40, "offers": [], "running": names}

    def examine(self) -> list[dict[str, Any]]:
        row = {"name": "disk", "level": "warn", "fact": "9 GiB are free", "remedy": "collect"}
        return [row]

    # --- engines: a JSON file says which run

    @contextmanager
    def engines(self) -> Iterator[dict[str, Any]]:
        with (folder() / "engines.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            running = told("engines", {})
            yield running
            tell("engines", running)

    def _act(self, verb: str, uid: str) -> None:
        note(f"{verb} {uid}")
        if verb in told("suicide", []):
            tell("suicide", [])
            os.kill(os.getpid(), 9)
        while verb in told("hold", []):
            time.sleep(0.02)

    def preflight(self, generation: Generation) -> None:
        self._act("preflight", generation.uid)
        if generation.uid in told("preflight-fails", []):
            raise MmError(f"{generation.uid} is not complete")

    def beside(
        self, generation: Generation, running: Replica | None, gone: Sequence[Replica] = ()
    ) -> Beside:
        if told("host") is not None:
            leaving = running.footprint.running("old", None, self.facts()) if running else None
            facts = self._facts_now([*gone])
            return choose_seat(self._footprints(generation, facts), facts, leaving)
        places = told("places")
        if places is None:
            return Beside(told("room", "overlap"), "as the test says")
        taken = len(told("engines", {}).keys() - {replica.uid for replica in gone})
        leaves = running is not None and self.process(running) is not None
        mode = "overlap" if taken < places else "swap" if taken - leaves < places else "refuse"
        return Beside(mode, f"{taken} of {places} places are taken")

    def _facts_now(self, gone: Sequence[Replica] = ()) -> HostFacts:
        """The described host less what its engines were predicted to hold."""
        facts = self.facts()
        there = Replica.objects.filter(uid__in=told("engines", {})).exclude(
            pk__in=[replica.pk for replica in gone]
        )
        held = [replica.footprint.running("", None, facts) for replica in there]
        return promised(facts, held)

    def _footprints(self, generation: Generation, facts: HostFacts) -> Sequence[Footprint]:
        asked = parse_spec(generation.spec_toml).devices
        known = footprints_from_json(generation.report(ReportKind.NEEDS))
        if asked:
            return [one.on(asked) for one in known if len(one.devices) == len(asked)]
        return everywhere(known, facts)

    def gpus(self, generation: Generation) -> list[dict[str, Json]] | None:
        if told("host") is None:
            return None
        devices = self.beside(generation, None).devices
        return [{"index": index, "uuid": f"GPU-{index}"} for index in devices]

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        return LaunchSpec(
            engine_kind="llama-server",
            argv=["engine", generation.uid, seat.socket],
            env=seat.gpu_environment,
            secret_env="KEY",
            expect=Expectation("smol-chat", slots=1, context_per_slot=2048),
            questions=QUESTIONS,
            load_deadline_s=30,
            socket=seat.socket,
        )

    def start(self, replica: Replica, launch: LaunchSpec) -> str:
        if replica.generation.uid in told("start-fails", []):
            raise MmError(f"{replica.generation.uid} cannot be started")
        with self.engines() as running:
            running.setdefault(replica.uid, replica.generation.uid)
        self._act("start", replica.uid)
        return str(told("sandbox", "bubblewrap"))

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
        self._act("probe", replica.uid)
        while "loading" in told("hold", []):
            check()
            time.sleep(0.02)
        if replica.generation.uid in told("probe-fails", []):
            raise ProbeFailed(
                f"{replica.generation.uid} answers nothing",
                remedy="read its log",
                report={"completion": "none"},
            )
        return {"ok": True, "whole": wanted is not None and not brief}

    def ask_rest(
        self,
        replica: Replica,
        launch: LaunchSpec,
        report: Mapping[str, Any],
        *,
        may_generate: Callable[[], bool],
        on_progress: Callable[[str], None],
    ) -> Mapping[str, Any]:
        self._act("ask-rest", replica.uid)
        if replica.generation.uid in told("ask-rest-fails", []):
            raise MmError("its launch file is gone")
        return {**report, "whole": may_generate()}

    def process(self, replica: Replica) -> ProcessIdentity | None:
        process = replace(PROCESS, started=told("started", PROCESS.started))
        return process if replica.uid in told("engines", {}) else None

    def alive(self, replica: Replica, launch: LaunchSpec) -> None:
        note(f"alive {replica.uid}")
        if replica.generation.uid in told("hangs", []):
            raise Unreachable("the engine does not answer: timeout")

    def loading(self, replica: Replica, launch: LaunchSpec) -> bool:
        return replica.generation.uid in told("loads", [])

    def work(self, replica: Replica, launch: LaunchSpec) -> str | None:
        mark = told("work", "")
        if mark == "unreachable":
            raise Unreachable("the engine does not answer: timeout")
        return mark

    def drift(self, replica: Replica, launch: LaunchSpec) -> Mapping[str, str]:
        runs = told("runs")
        other = {} if runs in (None, [*launch.argv]) else {"command": "it runs another command"}
        return {**told("drift", {}), **other}

    def stop(self, replica: Replica) -> None:
        with self.engines() as running:
            running.pop(replica.uid, None)
        self._act("stop", replica.uid)
