"""vLLM: `[serve]` options → argv and environment, from an environment object of its own.

The server is run as a module of the environment, listens on the seat's socket, asks no network and
keeps everything that it writes in the seat's scratch folder. The secret goes by `VLLM_API_KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
)
from mmadmin.core.engines.vllm.command import arguments, check_flags
from mmadmin.core.engines.vllm.memory_model import MEMORY
from mmadmin.core.engines.vllm.options import SEQUENCES, VllmOptions, read_options
from mmadmin.core.engines.vllm.parts import KIND, parts, pins, published
from mmadmin.core.engines.vllm.questions import QUESTIONS
from mmadmin.core.engines.vllm.spec import read_build
from mmadmin.core.engines.vllm.tables import FIRST_CONTEXT, TABLES
from mmadmin.core.environments import command, isolated_python, variables
from mmadmin.core.fit.estimate import MemoryModel
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.checkpoint.quantized import quantized
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.core.formats.checkpoint.tables import read_model
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec

MODULE = "vllm.entrypoints.cli.main"
SLOWEST_DISK = 50 * 1024 * 1024
"""Bytes per second that a load is allowed to take; the deadline is made of it."""
LOAD_SECONDS = 600
"""What a load may take besides reading: imports, compilation, profiling, CUDA graphs."""
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
FOLDERS: Mapping[str, str] = {
    "HOME": "",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "config/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "PYTHONPYCACHEPREFIX": "bytecode",
}
"""Variable → folder in the seat's scratch."""


class Vllm:
    """The engine of checkpoints."""

    kind = KIND
    tables = TABLES
    model_format = "checkpoint"
    memory: MemoryModel = MEMORY
    questions = QUESTIONS

    def read(self, tables: Mapping[str, Mapping[str, Json]], *, own_template: bool) -> EngineSpec:
        """Type and check `[model]`, `[engine]` and `[serve]`."""
        serve = read_options(tables["serve"])
        self.check(serve, own_template=own_template)
        return EngineSpec(read_build(tables["engine"]), read_model(tables["model"]), serve)

    def read_options(self, table: Mapping[str, Json]) -> VllmOptions:
        """The options that a `[serve]` table or a manifest sets."""
        return read_options(table)

    def pins(self, spec: Spec) -> Sequence[PinRequest]:
        """The checkpoint, what quantises it, and the packages of the engine."""
        return pins(spec)

    def parts(self, spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
        """Environment, checkpoint, report and the checked command."""
        return parts(spec, lock, facts)

    def published(self, spec: Spec, lock: Lock) -> Mapping[str, tuple[Derivation, str]]:
        """The checkpoint as it was fetched."""
        return published(spec, lock)

    def expected_header(self, header: CheckpointShape, spec: Spec) -> CheckpointShape:
        """The shape after `model.leave_out` and `model.quantize`."""
        kept = replace(header, files=header.files - set(spec.model.leave_out))
        return quantized(kept, spec.model) if spec.model.quantize else kept

    def first_options(self, header: CheckpointShape) -> Mapping[str, Json]:
        """As much context as was trained, within what most GPUs hold."""
        return {"max_model_len": min(header.context_train or FIRST_CONTEXT, FIRST_CONTEXT)}

    def check(self, options: VllmOptions, *, own_template: bool = False) -> None:
        """Refuse options that the server would refuse at start, or take silently for others."""
        check_flags(options)
        if options.enable_auto_tool_choice and not options.tool_call_parser:
            refuse(
                "serve.enable_auto_tool_choice",
                "tool calls cannot be read without a parser",
                remedy='set serve.tool_call_parser, for example "mistral"',
            )
        if own_template and options.tokenizer_mode == "mistral":
            refuse(
                "serve.tokenizer_mode",
                '"mistral" formats chats by itself and takes no template',
                remedy="remove the [template] table, or tokenizer_mode",
            )
        for name, most in options.limit_mm_per_prompt.items():
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                refuse(
                    f"serve.limit_mm_per_prompt.{name}",
                    "this must be a whole number",
                    remedy="write how many one request may hold; 0 rejects them",
                )

    def check_model(self, model: ModelFacts, options: VllmOptions) -> None:
        """The server refuses a context longer than the model was trained with."""
        wanted, trained = options.max_model_len or 0, model.context_length
        if trained and wanted > trained and "hf-overrides" not in options.flags:
            refuse(
                "serve.max_model_len",
                f"{wanted} tokens are more than the {trained} that the model was trained with",
                remedy=f"use {trained} or less",
            )

    def launch(self, system: System, seat: Seat) -> LaunchSpec:
        """The command in its fixed order. Raises `InvalidSpec` when options and seat disagree."""
        options: VllmOptions = system.options
        self.check(options, own_template=system.template is not None)
        model = str(system.parts["model"])
        argv = [*command(MODULE, "serve", model), *arguments(options, _ranks(options, seat))]
        if system.template is not None:
            argv += ["--chat-template", str(system.template)]
        argv += ["--served-model-name", system.alias, "--uds", seat.socket]
        facts = system.facts
        return LaunchSpec(
            engine_kind=self.kind,
            argv=argv,
            env=_environment(system, options, seat),
            secret_env="VLLM_API_KEY",  # noqa: S106 (the variable's name)
            expect=Expectation(
                alias=system.alias,
                slots=options.max_num_seqs or SEQUENCES,
                context_per_slot=options.max_model_len or (facts.context_length if facts else 0),
                capabilities=Capabilities(
                    images=_takes_images(facts, options),
                    tools=options.enable_auto_tool_choice is True,
                    reasoning=options.reasoning_parser is not None,
                ),
            ),
            questions=self.questions,
            load_deadline_s=LOAD_SECONDS + (facts.size_bytes if facts else 0) // SLOWEST_DISK,
            socket=seat.socket,
            readable=(str(isolated_python().parents[1]),),
        )


def _takes_images(facts: ModelFacts | None, options: VllmOptions) -> bool:
    modules = facts.metadata.get("modules") if facts else None
    names = modules if isinstance(modules, dict) else {}
    return options.images > 0 and any("vision" in name or "visual" in name for name in names)


def _ranks(options: VllmOptions, seat: Seat) -> int:
    devices = len(seat.devices or ())
    ranks = options.tensor_parallel_size or devices or 1
    if devices and ranks != devices:
        refuse(
            "serve.tensor_parallel_size",
            f"{ranks} ranks for {devices} GPUs",
            remedy=f"write {devices}, or give the deployment other GPUs",
        )
    return ranks


def _environment(system: System, options: VllmOptions, seat: Seat) -> dict[str, str]:
    """Its packages and GPUs; no network, and all that it writes in the scratch folder."""
    folders = {}
    if seat.scratch:
        folders = {n: f"{seat.scratch}/{folder}".rstrip("/") for n, folder in FOLDERS.items()}
    return {
        **variables(system.parts["engine"]),
        **OFFLINE,
        **folders,
        "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_cache_gib),
        **seat.gpu_environment,
    }


ENGINE: Engine = Vllm()
