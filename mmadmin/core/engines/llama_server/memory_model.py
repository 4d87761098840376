"""llama-server's `MemoryModel`: the exact estimate, suggestions and rules' case as one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mmadmin.core.engines.llama_server.load_log import buffers, missing_layers
from mmadmin.core.engines.llama_server.memory import predict
from mmadmin.core.engines.llama_server.options import LlamaOptions
from mmadmin.core.engines.llama_server.spec import LlamaBuild
from mmadmin.core.engines.llama_server.suggest import largest_context, most_slots, suggest
from mmadmin.core.fit.estimate import Calibration, Device, Estimate, Reach, Room, Suggestion
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.rules import Case, version_of
from mmadmin.core.formats.gguf.shape import ModelShape


class LlamaMemory:
    """See `mmadmin.core.fit.estimate.MemoryModel`; a projector is its only attachment."""

    def estimate(
        self,
        header: ModelShape,
        options: LlamaOptions,
        devices: Sequence[Device] = (),
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
        cpu_features: Sequence[str] = ("avx2",),
    ) -> Estimate:
        """Weights, caches, buffers and context, as the pinned engine places them."""
        run = options.run_shape(attachment_bytes)
        return predict(header, run, devices, calibration=calibration, cpu_features=cpu_features)

    def suggest(
        self,
        header: ModelShape,
        options: LlamaOptions,
        devices: Sequence[Device],
        room: Room,
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
    ) -> Sequence[Suggestion]:
        """Split, cache type, fewer slots, a shorter context."""
        return suggest(header, options.run_shape(attachment_bytes), devices, room, calibration)

    def reach(
        self, header: ModelShape, options: LlamaOptions, devices: Sequence[Device], room: Room
    ) -> Reach:
        """The longest context of a slot, and the most slots of the wanted context."""
        run = options.run_shape()
        return Reach(
            largest_context(header, run, devices, room), most_slots(header, run, devices, room)
        )

    def uses_gpus(self, options: LlamaOptions, build: LlamaBuild | None, facts: HostFacts) -> bool:
        """False with `gpu_layers = 0`, and for a build without CUDA."""
        return options.gpu_layers != 0 and (build is None or build.backend_on(facts) == "cuda")

    def device_count(self, options: LlamaOptions) -> int | None:
        """One GPU for each share of the tensor split."""
        return len(options.run_shape().tensor_split) or None

    def case(self, header: ModelShape, options: LlamaOptions) -> Case:
        """What the rules need to know of a GGUF deployment."""
        run = options.run_shape()
        context = run.context or header.context_train
        return Case(
            engine="llama-server",
            model_format="gguf",
            model_architecture=header.architecture,
            weight_types=frozenset(weight.type for weight in header.weights),
            cache_type=run.cache_type_k,
            tensor_split=run.tensor_split,
            total_context=context * run.slots,
            wanted_context=context,
            slots=run.slots,
            trained_context=header.context_train or None,
        )

    def build_case(self, build: LlamaBuild) -> Case:
        """The release of the package, and the architectures that the file names."""
        return Case(
            engine="llama-server",
            engine_version=version_of(build.package.partition("==")[2]),
            built_for=build.cuda_architectures,
        )

    def measured_buffers(self, lines: Iterable[str]) -> Mapping[int, Mapping[str, int]]:
        """Buffer sizes that the engine logs while it loads."""
        return buffers(lines)

    def missing_layers(self, estimate: Estimate, lines: Iterable[str]) -> str:
        """By the count of offloaded layers, and by the warning that no GPU is usable."""
        return missing_layers(estimate, lines)


MEMORY = LlamaMemory()
