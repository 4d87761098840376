"""What an engine is: objects + options + seat → a `LaunchSpec`. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.questions import Questions
from mmadmin.core.fit.estimate import MemoryModel
from mmadmin.core.home import ENGINE_SOCKET
from mmadmin.core.spec.fields import Field

if TYPE_CHECKING:
    from mmadmin.core.build.derivation import Derivation
    from mmadmin.core.fit.facts import HostFacts
    from mmadmin.core.spec.lock import Lock, LockedFile
    from mmadmin.core.spec.pins import PinRequest
    from mmadmin.core.spec.spec import Spec

Options = Any
"""An engine's own frozen object, made by `Engine.read_options`; nobody else looks into it."""
TEMPLATE = "template"
"""The part that is a chat template."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model file says about itself (see `ModelFormat.facts_of`)."""

    architecture: str
    size_bytes: int
    layers: int = 0
    context_length: int = 0
    """Training context, tokens."""
    embedding_length: int = 0
    head_count: int = 0
    head_count_kv: int = 0
    metadata: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> ModelFacts:
        """A report that has these names; what it does not say is 0."""
        numbers = (
            *("size_bytes", "layers", "context_length", "embedding_length"),
            *("head_count", "head_count_kv"),
        )
        return cls(
            architecture=str(report.get("architecture") or ""),
            metadata=dict(report),
            **{name: int(report.get(name) or 0) for name in numbers},
        )


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a deployment file whose fields are an engine's own."""

    engine: Sequence[Field]
    """Besides `kind`, which every engine has."""
    model: Sequence[Field]
    serve: Sequence[Field]
    first_serve: Mapping[str, Json] = field(default_factory=dict)
    """What `[serve]` of a new file begins with."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine makes of its tables: frozen objects that it alone looks into."""

    engine: Any
    model: Any
    serve: Options


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine's system is made of."""

    inputs: Mapping[str, Derivation]
    """By part name: the inputs of the `system` step, with one named `report`."""
    files: Mapping[str, str | None]
    """Part → its file inside the object, None = it has no such part; one without is a folder."""
    template: Derivation | None = None
    """The model's own chat template as a file, where the deployment patches it."""


@dataclass(frozen=True, slots=True)
class System:
    """The object that a generation runs, with its parts as absolute paths."""

    engine_kind: str
    alias: str
    """The model name that clients use."""
    parts: Mapping[str, Path]
    """`engine` (a folder), `model`, `template` … (files), as far as it has them."""
    options: Options
    facts: ModelFacts | None = None
    """What the model says about itself, as its report has it."""

    @property
    def template(self) -> Path | None:
        """The chat template file, or None for the model's own."""
        return self.parts.get(TEMPLATE)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a replica sits on its host."""

    socket: str
    """The Unix socket to listen on, an absolute path that ends in `.sock`."""
    devices: Sequence[int] | None = None
    """GPU indices, in the driver's order; empty = none of them, None = all that are visible."""
    uuids: Sequence[str] = ()
    """Their UUIDs, in the same order; empty = not known."""
    scratch: str = ""
    """A private folder that lasts as long as the replica; empty = the command is not run."""

    @property
    def gpu_environment(self) -> Mapping[str, str]:
        """What shows the engine these GPUs and no others, numbered from 0."""
        return {} if self.devices is None else visible_gpus(self.devices, self.uuids)


SOMEWHERE = Seat(socket=ENGINE_SOCKET)
"""For a command that is looked at and not run."""


def visible_gpus(devices: Sequence[int], uuids: Sequence[str]) -> Mapping[str, str]:
    """What shows a CUDA program these GPUs and no others: by UUID where all are known."""
    named = len(uuids) == len(devices) and all(uuids)
    visible = uuids if named else [str(index) for index in devices]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(visible)}


Task = Literal["completion", "embedding", "rerank"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What clients may ask of a replica."""

    images: bool = False
    tools: bool = True
    reasoning: bool = False
    """Its options ask for reasoning in a field of the answer."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a replica must show before it serves."""

    alias: str
    task: Task = "completion"
    slots: int = 0
    """Requests at once; 0 = not checked."""
    context_per_slot: int = 0
    """Tokens; 0 = not checked."""
    model_file: str = ""
    """The model file that the engine must name; empty = not checked."""
    template_path: str = ""
    """The file with the chat template that the engine must use; empty = not checked."""
    capabilities: Capabilities = Capabilities()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything a supervisor needs to start a replica. Holds no secret."""

    engine_kind: str
    argv: Sequence[str]
    env: Mapping[str, str]
    secret_env: str
    """Name of the environment variable that carries the replica's secret."""
    expect: Expectation
    questions: Questions
    load_deadline_s: int
    """Scaled with the model's size."""
    socket: str
    """The Unix socket on which it will answer."""
    help_argv: Sequence[str] = ()
    """A command that names every option of this very build; empty = it has none."""
    readable: Sequence[str] = ()
    """Absolute paths that its sandbox shows it besides its closure and the system's libraries."""
    devices: Sequence[int] | None = ()
    """Indices of the GPUs that it may use; None = all of the host's."""


class Engine(Protocol):
    """One kind of engine; its module ends with `ENGINE: Engine = ...`."""

    kind: str
    tables: Tables
    model_format: str
    """The kind of the model format that it loads."""
    memory: MemoryModel
    questions: Questions

    def read(self, tables: Mapping[str, Mapping[str, Json]], *, own_template: bool) -> EngineSpec:
        """Type and check its tables, whose values fit their fields. Raises `InvalidSpec`.

        `own_template`: the deployment brings a chat template other than the model's own.
        """
        ...

    def read_options(self, table: Mapping[str, Json]) -> Options:
        """The options that a `[serve]` table or a manifest's `options` sets, defaults filled in."""
        ...

    def pins(self, spec: Spec) -> Sequence[PinRequest]:
        """What a lock must pin for it."""
        ...

    def parts(self, spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
        """The derivations of its system. Raises `DoesNotFit`, `ToolMissing`, `InvalidSpec`."""
        ...

    def published(self, spec: Spec, lock: Lock) -> Mapping[str, tuple[Derivation, str]]:
        """Model and attachments as they are published: the pin's name → step, file inside it."""
        ...

    def expected_header(self, header: Any, spec: Spec) -> Any:
        """The header of the model that the deployment will serve, given the published one's."""
        ...

    def first_options(self, header: Any) -> Mapping[str, Json]:
        """A `[serve]` table to begin with, for a model that nobody has served yet."""
        ...

    def check_model(self, model: ModelFacts, options: Options) -> None:
        """Refuse options that do not go with the built model (`InvalidSpec`)."""
        ...

    def launch(self, system: System, seat: Seat) -> LaunchSpec:
        """The command, its environment and what to expect of it: data only."""
        ...


@dataclass(frozen=True, slots=True)
class TextMeasure:
    """A text, and how a model's prediction of it is measured."""

    text: LockedFile
    context: int
    """Tokens per chunk."""
    chunks: int = 0
    """How many chunks; 0 = the whole text."""


@runtime_checkable
class MeasuresText(Protocol):
    """An engine whose models can be measured on a text, without a server."""

    def text_report(
        self, spec: Spec, lock: Lock, facts: HostFacts, measure: TextMeasure
    ) -> Derivation:
        """The step whose object has the report that `core.evaluation.text` reads."""
        ...
