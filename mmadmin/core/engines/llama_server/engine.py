"""llama-server: `[serve]` options → argv, with the checks that the server makes late or never.

`context` is what one request may use: the server divides `--ctx-size` by its slots, so it is
given context x slots. The secret goes by `LLAMA_API_KEY`. The order of the argv is fixed: golden
files pin it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.fields import FIELDS
from mmadmin.core.engines.llama_server.flags import BY_NAME, FILES, FLAGS, OURS, Flag, is_preset
from mmadmin.core.engines.llama_server.measuring import text_report
from mmadmin.core.engines.llama_server.memory_model import MEMORY
from mmadmin.core.engines.llama_server.options import (
    BATCH,
    CACHE_TYPE,
    UBATCH,
    LlamaOptions,
    option_text,
    read_options,
)
from mmadmin.core.engines.llama_server.parts import (
    BINARY,
    KIND,
    fetched_model,
    fetched_projector,
    parts,
    pins,
)
from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.engines.llama_server.spec import read_build, read_model
from mmadmin.core.engines.llama_server.tables import FIRST_CONTEXT, TABLES
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
    TextMeasure,
)
from mmadmin.core.fit.estimate import MemoryModel
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.gguf.expected_shape import requantized
from mmadmin.core.formats.gguf.shape import ModelShape
from mmadmin.core.spec.fields import Field, Refusals, refuse, suggestion
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec

SLOWEST_DISK = 50 * 1024 * 1024
"""Bytes per second that a load is allowed to take; the deadline is made of it."""
LOAD_SECONDS = 120
"""What a load may take besides reading: start, warm-up, GPU context."""
_NAMED: Mapping[str, Field] = {f.name: f for f in FIELDS if f.flag}
_BY_FLAG: Mapping[str, Field] = {BY_NAME[f.flag[2:]].name: f for f in _NAMED.values()}
_SETTABLE = [
    flag.name for flag in FLAGS if flag.name not in OURS.keys() | FILES and not is_preset(flag.name)
]
"""The options that `[serve.flags]` may hold."""
_BEFORE_TEMPLATE = ("context", "gpu_layers", "tensor_split", "slots", "jinja")


class LlamaServer:
    """The engine of GGUF models."""

    kind = KIND
    tables = TABLES
    model_format = "gguf"
    memory: MemoryModel = MEMORY
    questions = QUESTIONS

    def read(self, tables: Mapping[str, Mapping[str, Json]], *, own_template: bool) -> EngineSpec:
        """Type and check `[model]`, `[engine]` and `[serve]`."""
        serve = read_options(tables["serve"])
        self.check(serve, own_template=own_template)
        model = read_model(tables["model"])
        return EngineSpec(read_build(tables["engine"], model), model, serve)

    def read_options(self, table: Mapping[str, Json]) -> LlamaOptions:
        """The options that a `[serve]` table or a manifest sets."""
        return read_options(table)

    def pins(self, spec: Spec) -> Sequence[PinRequest]:
        """The model's files, its projector's and the engine's archive."""
        return pins(spec)

    def parts(self, spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
        """Engine, model, report and projector."""
        return parts(spec, lock, facts)

    def text_report(
        self, spec: Spec, lock: Lock, facts: HostFacts, measure: TextMeasure
    ) -> Derivation:
        """Perplexity of a text, by llama-perplexity."""
        return text_report(spec, lock, facts, measure)

    def published(self, spec: Spec, lock: Lock) -> Mapping[str, tuple[Derivation, str]]:
        """The model as it was fetched, and its projector."""
        projector = fetched_projector(spec, lock)
        model = {"model": fetched_model(spec, lock)}
        return {**model, "mmproj": projector} if projector else model

    def expected_header(self, header: ModelShape, spec: Spec) -> ModelShape:
        """The shape after `model.quantize`."""
        return requantized(header, spec.model.quantize)

    def first_options(self, header: ModelShape) -> Mapping[str, Json]:
        """As much context as was trained, within what most GPUs hold."""
        return {"context": min(header.context_train or FIRST_CONTEXT, FIRST_CONTEXT)}

    def check(self, options: LlamaOptions, *, own_template: bool = False) -> None:
        """Refuse options that the server would refuse at start, or take silently for others."""
        if options.context == 0 and options.slots > 1:
            refuse(
                "serve.context",
                f"{options.slots} slots need a context of their own",
                remedy="write the tokens that one request may use, for example context = 8192",
            )
        _check_split(options)
        _check_batches(options)
        if own_template and options.jinja is False:
            refuse(
                "serve.jinja",
                "a chat template of the deployment file needs it",
                remedy="remove jinja = false, or the [template] table",
            )
        value = options.cache_type_v or CACHE_TYPE
        if value not in ("f32", "f16", "bf16") and options.flash_attention == "off":
            refuse(
                "serve.cache_type_v",
                f'"{value}" needs flash attention, which is off',
                remedy='set flash_attention to "on" or "auto", or cache_type_v to "f16"',
            )
        if options.embeddings and options.reranking:
            refuse(
                "serve.reranking",
                "an engine serves embeddings or reranking, not both",
                remedy="remove one of the two",
            )
        if options.chat_template_kwargs is not None:
            _check_kwargs(options.chat_template_kwargs)
        refusals = Refusals()
        for name, flag_value in options.flags.items():
            with refusals.gathering():
                _check_flag(name, flag_value)
        refusals.raise_found()

    def check_model(self, model: ModelFacts, options: LlamaOptions) -> None:
        """The server silently caps a slot's context at what the model was trained with."""
        context, trained = options.context, model.context_length
        if trained and context > trained and "override-kv" not in options.flags:
            refuse(
                "serve.context",
                f"{context} tokens are more than the {trained} that the model was trained with",
                remedy=f"use {trained} or less",
            )

    def launch(self, system: System, seat: Seat) -> LaunchSpec:
        """The argv in its fixed order. Raises `InvalidSpec` when options and seat disagree."""
        options: LlamaOptions = system.options
        self.check(options, own_template=system.template is not None)
        _check_seat(options, seat)
        argv = [str(system.parts["engine"] / BINARY), "--model", str(system.parts["model"])]
        if "mmproj" in system.parts:
            argv += ["--mmproj", str(system.parts["mmproj"])]
        argv += ["--host", seat.socket]
        values = {name: getattr(options, name) for name in _NAMED}
        values["context"] = options.context * options.slots
        for name in _BEFORE_TEMPLATE:
            argv += _argument(_NAMED[name], values[name])
        if system.template is not None:
            argv += ["--chat-template-file", str(system.template)]
        for name, field in _NAMED.items():
            if name not in _BEFORE_TEMPLATE:
                argv += _argument(field, values[name])
        argv += ["--alias", system.alias]
        for name, flag_value in sorted(options.flags.items()):
            argv += _flag_argument(name, flag_value)
        size = system.facts.size_bytes if system.facts else 0
        return LaunchSpec(
            engine_kind=self.kind,
            argv=argv,
            env=seat.gpu_environment,
            secret_env="LLAMA_API_KEY",  # noqa: S106 (the variable's name)
            expect=Expectation(
                alias=system.alias,
                task=options.task,
                slots=options.slots,
                context_per_slot=_context_per_slot(system, options),
                model_file=argv[2],
                template_path=str(system.template or ""),
                capabilities=_capabilities(system, options),
            ),
            questions=self.questions,
            load_deadline_s=LOAD_SECONDS + size // SLOWEST_DISK,
            socket=seat.socket,
            help_argv=(argv[0], "--help"),
        )


def _context_per_slot(system: System, options: LlamaOptions) -> int:
    """The context that the server shows for a slot: all of a unified cache, if the model can."""
    if not options.kv_unified:
        return options.context
    whole = options.context * options.slots
    trained = system.facts.context_length if system.facts else 0
    return min(whole, trained) if trained else whole


def _capabilities(system: System, options: LlamaOptions) -> Capabilities:
    return Capabilities(
        images="mmproj" in system.parts,
        tools=options.jinja is not False,
        reasoning=options.reasoning is not None or options.reasoning_format is not None,
    )


def _check_split(options: LlamaOptions) -> None:
    if options.tensor_split is None:
        return
    if sum(options.tensor_split) == 0:
        refuse(
            "serve.tensor_split",
            "the shares add up to nothing",
            remedy="write one number above 0 for each GPU, for example [1, 1]",
        )
    if options.gpu_layers == 0:
        refuse(
            "serve.tensor_split",
            "gpu_layers = 0 keeps everything off the GPUs",
            remedy="remove tensor_split, or set gpu_layers",
        )


def _check_batches(options: LlamaOptions) -> None:
    batch, ubatch = options.batch or BATCH, options.ubatch or UBATCH
    if ubatch > batch:
        refuse(
            "serve.ubatch",
            f"{ubatch} is larger than the logical batch of {batch}",
            remedy="make batch at least as large as ubatch",
        )


def _check_kwargs(text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(
            "serve.chat_template_kwargs",
            "this is not a JSON object",
            remedy="write for example '{\"enable_thinking\": false}'",
        )


def _check_flag(name: str, value: Json) -> None:
    """Refuse an option of `[serve.flags]` by its name, then by its value."""
    dotted = f"serve.flags.{name}"
    _check_flag_name(dotted, name)
    flag = BY_NAME[name]
    if flag.takes_value:
        _check_flag_value(dotted, flag, value)
    elif not isinstance(value, bool):
        refuse(dotted, "this is a switch", remedy="write true or false")
    elif value is False and not flag.off:
        refuse(dotted, "this switch has no off form", remedy="remove it")


def _check_flag_name(dotted: str, name: str) -> None:
    bare = name.removeprefix("--").replace("_", "-")
    if bare != name and bare in BY_NAME:
        refuse(dotted, "an option is written as in --help, no dashes before it", remedy=f'"{bare}"')
    if name not in BY_NAME:
        refuse(dotted, "the engine has no such option", remedy=suggestion(name, _SETTABLE))
    flag = BY_NAME[name]
    if flag.name in _BY_FLAG:
        refuse(dotted, "this option has a field", remedy=f"use serve.{_BY_FLAG[flag.name].name}")
    if flag.name in OURS:
        refuse(dotted, "a deployment file may not set this option", remedy=OURS[flag.name])
    if flag.name in FILES:
        refuse(dotted, "this option names a file that nothing pins", remedy="remove it")
    if is_preset(flag.name):
        refuse(dotted, "this option downloads a model", remedy="name the model in [model]")
    if name == flag.off:
        refuse(dotted, "a switch has its positive name", remedy=f"write {flag.name} = false")


def _check_flag_value(dotted: str, flag: Flag, value: Json) -> None:
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        refuse(dotted, "this option takes a value", remedy="write text or a number")
    text = option_text(value)
    if flag.values and text not in flag.values:
        refuse(dotted, f'"{text}" is not one of its values', remedy=suggestion(text, flag.values))
    if any(ord(c) < ord(" ") for c in text):
        refuse(dotted, "control characters are not allowed here", remedy="write one line")


def _check_seat(options: LlamaOptions, seat: Seat) -> None:
    shares = options.tensor_split
    if shares and seat.devices is not None and len(shares) != len(seat.devices):
        refuse(
            "serve.tensor_split",
            f"{len(shares)} shares for {len(seat.devices)} GPUs",
            remedy=f"write {len(seat.devices)} numbers, or give the deployment other GPUs",
        )


def _argument(field: Field, value: object) -> list[str]:
    """One named option as argv words; nothing when it is not set."""
    if value is None:
        return []
    if field.kind == "boolean":
        flag = BY_NAME[field.flag[2:]]
        if value:
            return [field.flag]
        return [f"--{flag.off}"] if flag.off else []
    return [field.flag, option_text(value)]


def _flag_argument(name: str, value: Json) -> list[str]:
    flag = BY_NAME[name]
    if flag.takes_value:
        return [f"--{name}", option_text(value)]
    return [f"--{name}"] if value else [f"--{flag.off}"]


ENGINE: Engine = LlamaServer()
