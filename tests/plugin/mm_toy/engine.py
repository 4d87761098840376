"""The engine: a small HTTP server that says a model's words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from mm_toy.model import ToyHeader
from mm_toy.recipes import PROGRAM, server_digest
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import (
    Capabilities,
    Engine,
    EngineSpec,
    Expectation,
    LaunchSpec,
    ModelFacts,
    Parts,
    Seat,
    System,
    Tables,
)
from mmadmin.core.engines.questions import Context, Guarded, Health, Question, Questions
from mmadmin.core.fit.estimate import Calibration, Device, Estimate, Reach, Room, Suggestion
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.rules import Case
from mmadmin.core.snapshot import ErrorPatterns
from mmadmin.core.spec.fields import Field, refuse
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.origin import Origin, Wording, origin_fields
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec
from mmadmin.core.spec.steps import fetch, step

KIND = "toy"
OVERHEAD_BYTES = 16 * 1024 * 1024
"""What the server takes besides its model."""
_ORIGIN = origin_fields(
    ("path",),
    {
        "source": Wording('Where the model comes from: "path".', example="path"),
        "path": Wording("A .toy file of the host.", example="/srv/models/parrot.toy"),
    },
)
TABLES = Tables(
    engine=(Field("greeting", "string", "What every answer begins with.", default="Hello"),),
    model=tuple(_ORIGIN.values()),
    serve=(
        Field("window", "integer", "Words of a request.", default=64, minimum=1, maximum=4096),
        Field("lanes", "integer", "Requests at once.", default=2, minimum=1, maximum=64),
        Field("load_ms", "integer", "How long loading takes.", default=0, minimum=0, unit="ms"),
    ),
)


@dataclass(frozen=True, slots=True)
class ToyBuild:
    """`[engine]`."""

    greeting: str = "Hello"


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """`[serve]`."""

    window: int = 64
    lanes: int = 2
    load_ms: int = 0


class ToyMemory:
    """The model, and a little."""

    def estimate(
        self,
        header: ToyHeader,
        options: ToyOptions,
        devices: Sequence[Device] = (),
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
        cpu_features: Sequence[str] = (),
    ) -> Estimate:
        """All of it in main memory."""
        parts = {"model": header.size_bytes, "server": OVERHEAD_BYTES}
        return Estimate(devices=tuple({} for _ in devices), host=parts, context=options.window)

    def suggest(
        self,
        header: ToyHeader,
        options: ToyOptions,
        devices: Sequence[Device],
        room: Room,
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
    ) -> Sequence[Suggestion]:
        """Nothing makes it smaller."""
        return ()

    def reach(
        self, header: ToyHeader, options: ToyOptions, devices: Sequence[Device], room: Room
    ) -> Reach:
        """What the fields allow."""
        return Reach(largest_context=4096, most_slots=64)

    def uses_gpus(self, options: ToyOptions, build: Any, facts: HostFacts) -> bool:
        """Never."""
        return False

    def device_count(self, options: ToyOptions) -> int | None:
        """None of them."""
        return 0

    def case(self, header: ToyHeader, options: ToyOptions) -> Case:
        """Nothing that a rule is about."""
        return Case(engine=KIND, model_format="toy")

    def build_case(self, build: Any) -> Case:
        """The same."""
        return Case(engine=KIND)

    def measured_buffers(self, lines: Iterable[str]) -> Mapping[int, Mapping[str, int]]:
        """Its log says nothing."""
        return {}

    def missing_layers(self, estimate: Estimate, lines: Iterable[str]) -> str:
        """It has no layers."""
        return ""


def _counters(text: str) -> dict[str, str]:
    return dict(line.split() for line in text.splitlines())


def _context(text: str) -> Context:
    counters = _counters(text)
    return Context(slots=int(counters["toy_lanes"]), tokens_per_slot=int(counters["toy_window"]))


def _progress(text: str) -> str:
    counters = _counters(text)
    return counters["toy_words_total"] if counters["toy_running"] != "0" else ""


QUESTIONS = Questions(
    health=Health("/status", loading=(425,)),
    served_names=Question("/name", lambda text: [text.removeprefix("serving ")]),
    error_message=lambda text: text.removeprefix("sorry: "),
    error_patterns=ErrorPatterns(request="sorry: too many words"),
    guarded=Guarded("/name", refusals=(403,)),
    context=Question("/counters", _context),
    progress=Question("/counters", _progress),
)


class Toy:
    """Says words."""

    kind = KIND
    tables = TABLES
    model_format = "toy"
    memory = ToyMemory()
    questions = QUESTIONS

    def read(self, tables: Mapping[str, Mapping[str, Json]], *, own_template: bool) -> EngineSpec:
        """Type the tables; a template makes no sense here."""
        if own_template:
            refuse("template", "the toy engine has no chat template", remedy="remove it")
        build = {k: v for k, v in tables["engine"].items() if k != "kind"}
        return EngineSpec(
            engine=ToyBuild(**build),  # type: ignore[arg-type]
            model=Origin(**tables["model"]),  # type: ignore[arg-type]
            serve=self.read_options(tables["serve"]),
        )

    def read_options(self, table: Mapping[str, Json]) -> ToyOptions:
        """Defaults filled in."""
        return ToyOptions(**table)  # type: ignore[arg-type]

    def pins(self, spec: Spec) -> Sequence[PinRequest]:
        """The model's file."""
        origin: Origin = spec.model
        return [
            PinRequest("model", "model", asdict(origin), origin, "model.path", model_format="toy")
        ]

    def parts(self, spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
        """Engine, model, report."""
        build: ToyBuild = spec.engine
        params: dict[str, Json] = {"server_sha256": server_digest(), "greeting": build.greeting}
        engine = step("toy-engine", "toy-engine", params, {})
        model, file = self.published(spec, lock)["model"]
        report = step("toy-report", PurePosixPath(file).stem, {"file": file}, {"model": model})
        return Parts({"engine": engine, "model": model, "report": report}, {"model": file})

    def published(self, spec: Spec, lock: Lock) -> Mapping[str, tuple[Derivation, str]]:
        """The file as it is."""
        file = lock.one("model")
        return {"model": (fetch(PurePosixPath(file.path).stem, lock.of("model")), file.path)}

    def expected_header(self, header: ToyHeader, spec: Spec) -> ToyHeader:
        """Nothing changes it."""
        return header

    def first_options(self, header: ToyHeader) -> Mapping[str, Json]:
        """As it was trained."""
        return {"window": header.context_train}

    def check_model(self, model: ModelFacts, options: ToyOptions) -> None:
        """A window cannot be wider than the training."""
        if options.window > model.context_length:
            refuse(
                "serve.window",
                f"{options.window} words are more than the {model.context_length} of the model",
                remedy=f"use {model.context_length} or less",
            )

    def launch(self, system: System, seat: Seat) -> LaunchSpec:
        """Python runs the program of the engine object."""
        options: ToyOptions = system.options
        return LaunchSpec(
            engine_kind=KIND,
            argv=[
                *(sys.executable, str(system.parts["engine"] / PROGRAM)),
                *("--model", str(system.parts["model"]), "--name", system.alias),
                *("--socket", seat.socket, "--lanes", str(options.lanes)),
                *("--window", str(options.window), "--load-ms", str(options.load_ms)),
            ],
            env=dict(seat.gpu_environment),
            secret_env="TOY_SECRET",
            expect=Expectation(
                alias=system.alias,
                slots=options.lanes,
                context_per_slot=options.window,
                capabilities=Capabilities(tools=False),
            ),
            questions=QUESTIONS,
            load_deadline_s=30 + options.load_ms // 1000,
            socket=seat.socket,
            readable=[sys.prefix],
        )


ENGINE: Engine = Toy()
