"""vLLM: options to argv, by the commands of its deployments; refusals before the server starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.catalog import engine
from mmadmin.core.engines.protocol import Capabilities, LaunchSpec, ModelFacts, Seat, System
from mmadmin.core.engines.vllm.command import OURS, check_command, read_parser
from mmadmin.core.engines.vllm.engine import ENGINE, MODULE, Vllm
from mmadmin.core.engines.vllm.fields import FIELDS
from mmadmin.core.errors import InvalidInput, InvalidSpec
from mmadmin.core.spec.fields import read_table
from mmadmin.core.spec.spec import Spec, parse_spec

CATALOG = Path(__file__).parents[4] / "deployments" / "catalog"
PARSER = read_parser(
    json.loads((Path(__file__).parent / "golden" / "options-0.32.0.json").read_text())
)
"""The options of vLLM 0.32.0 as `vllm-options` has written them down."""
SERVER = Vllm()
SYSTEM = System(
    parts={"engine": Path("/store/environment"), "model": Path("/store/model")},
    options=SERVER.read_options({}),
    engine_kind="vllm",
    alias="model",
    facts=ModelFacts(
        "Mistral3ForConditionalGeneration",
        size_bytes=100 << 30,
        context_length=262_144,
        metadata={"modules": {"model.vision_tower.layers.*.q_proj": {}}},
    ),
)
SEAT = Seat("/run/engine.sock", scratch="/run/scratch")
EXCEPTIONS: Mapping[str, str] = {
    "--tokenizer": "the checkpoint keeps the tokenizer files of its source, tekken.json among them",
    "--uds": "the engine listens on a socket instead of a port",
    "--served-model-name": "clients use the deployment's name, not a path of the store",
}
"""Options that differ from the published commands, and why."""
COMMANDS = {
    "mistral-medium-3.5-fp8": (
        4,
        """vllm serve mbehr90/Mistral-Medium-3.5-128B-fp8 --tensor-parallel-size 4
        --max-model-len 32768 --gpu-memory-utilization 0.85
        --limit-mm-per-prompt '{"image": 4}'""",
    ),
    "mistral-medium-3.5-nvfp4": (
        4,
        """vllm serve mbehr90/Mistral-Medium-3.5-128B-nvfp4 --tensor-parallel-size 4
        --max-model-len 32768 --gpu-memory-utilization 0.85
        --limit-mm-per-prompt '{"image": 4}'""",
    ),
    "mistral-medium-3.5-w4a16-kv8": (
        2,
        """vllm serve <path-or-repo> --tokenizer mistralai/Mistral-Medium-3.5-128B
        --tokenizer-mode mistral --tool-call-parser mistral --reasoning-parser mistral
        --enable-auto-tool-choice --dtype auto --limit-mm-per-prompt '{"image":0}'
        --tensor-parallel-size 2 --max-model-len 65536 --gpu-memory-utilization 0.92""",
    ),
}
"""Deployment → number of GPUs, and the command that the model's card publishes."""


def catalog(name: str) -> Spec:
    """A deployment of the catalog."""
    return parse_spec((CATALOG / f"{name}.toml").read_text(encoding="utf-8"))


def launch(options: Mapping[str, Any], *, seat: Seat = SEAT, system: System = SYSTEM) -> LaunchSpec:
    """The launch of some options, read as the parser reads them."""
    values = read_table(FIELDS, options, "serve")
    return SERVER.launch(replace(system, options=SERVER.read_options(values)), seat)


def refusal(options: Mapping[str, Any], **more: Any) -> InvalidSpec:
    """How some options are refused."""
    with pytest.raises(InvalidSpec) as caught:
        launch(options, **more)
    return caught.value


def named(words: list[str]) -> dict[str, Any]:
    """Options of a command by name; JSON is read."""
    found: dict[str, Any] = {}
    for n, word in enumerate(words):
        if word.startswith("--"):
            value = words[n + 1] if n + 1 < len(words) else ""
            value = "" if value.startswith("--") else value
            found[word] = json.loads(value) if value.startswith("{") else value
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_deployment_of_the_catalog_has_the_published_command(name: str) -> None:
    """Option for option, but for the documented exceptions."""
    gpus, published = COMMANDS[name]
    spec = catalog(name)
    system = replace(SYSTEM, options=spec.serve, alias=spec.public_name)
    made = SERVER.launch(system, Seat("/run/engine.sock", devices=tuple(range(gpus))))
    at = made.argv.index(MODULE)
    assert made.argv[at : at + 3] == [MODULE, "serve", "/store/model"]
    ours, theirs = named(list(made.argv[at + 3 :])), named(shlex.split(published)[3:])
    assert {k: v for k, v in ours.items() if k not in EXCEPTIONS} == {
        k: v for k, v in theirs.items() if k not in EXCEPTIONS
    }
    assert ours.keys() - theirs.keys() == {"--uds", "--served-model-name"}
    assert (ours["--uds"], ours["--served-model-name"]) == ("/run/engine.sock", name)
    check_command(spec.tables["serve"], PARSER)


def test_the_command_and_its_environment() -> None:
    """Word for word, with its secret, caches and network switches by environment."""
    made = launch(
        {
            "max_model_len": 4096,
            "tensor_parallel_size": 2,
            "limit_mm_per_prompt": {"image": 2},
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_seqs": 8,
            "flags": {
                "max-logprobs": 5,
                "async-scheduling": True,
                "lora-target-modules": ["q", "k"],
            },
        },
        seat=replace(SEAT, devices=(1, 3), uuids=("GPU-b", "GPU-d")),
        system=replace(SYSTEM, parts={**SYSTEM.parts, "template": Path("/store/t/chat.jinja")}),
    )
    at = made.argv.index(MODULE)
    assert made.argv[at + 1 :] == [
        *("serve", "/store/model", "--max-model-len", "4096", "--tensor-parallel-size", "2"),
        *("--limit-mm-per-prompt", '{"image": 2}', "--max-num-seqs", "8", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--async-scheduling"),
        *("--lora-target-modules", "q", "k", "--max-logprobs", "5"),
        *("--chat-template", "/store/t/chat.jinja"),
        *("--served-model-name", "model", "--uds", "/run/engine.sock"),
    ]
    assert made.secret_env == "VLLM_API_KEY"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-d"
    assert {made.env[n] for n in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")} == {"1"}
    for name in (
        "HOME",
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        assert made.env[name].startswith("/run/scratch"), name
    assert made.expect.capabilities == Capabilities(images=True, tools=False, reasoning=False)
    assert (made.expect.slots, made.expect.context_per_slot) == (8, 4096)
    assert made.load_deadline_s == 600 + 2048


def test_it_shares_each_layer_among_all_its_gpus() -> None:
    """Without a size of its own; other numbers than it has are refused."""
    argv = list(launch({}, seat=replace(SEAT, devices=(0, 1, 2, 3))).argv)
    assert argv[argv.index("--tensor-parallel-size") + 1] == "4"
    assert "--tensor-parallel-size" not in launch({}, seat=replace(SEAT, devices=(2,))).argv
    error = refusal({"tensor_parallel_size": 3}, seat=replace(SEAT, devices=(0, 1)))
    assert error.details["field"] == "serve.tensor_parallel_size"


@pytest.mark.parametrize(
    ("options", "field", "remedy"),
    [
        ({"enable_auto_tool_choice": True}, "serve.enable_auto_tool_choice", "tool_call_parser"),
        ({"limit_mm_per_prompt": {"image": -1}}, "serve.limit_mm_per_prompt.image", "0 rejects"),
        ({"flags": {"--seed": 1}}, "serve.flags.--seed", '"seed"'),
        ({"flags": {"max_logprobs": 1}}, "serve.flags.max_logprobs", '"max-logprobs"'),
        ({"flags": {"no-enforce-eager": True}}, "serve.flags.no-enforce-eager", "enforce_eager"),
        ({"flags": {"api-key": "x"}}, "serve.flags.api-key", "secrets"),
        ({"flags": {"no-trust-remote-code": True}}, "serve.flags.no-trust-remote-code", "code"),
    ],
)
def test_refuses_what_no_version_takes(options: Any, field: str, remedy: str) -> None:
    """By its field, with what to do instead."""
    error = refusal(options)
    assert error.details["field"] == field
    assert remedy in error.remedy


def test_a_template_needs_a_tokenizer_that_takes_one() -> None:
    """mistral_common formats chats by itself."""
    system = replace(SYSTEM, parts={**SYSTEM.parts, "template": Path("/store/t/chat.jinja")})
    error = refusal({"tokenizer_mode": "mistral"}, system=system)
    assert error.details["field"] == "serve.tokenizer_mode"


def test_a_context_beyond_training_is_refused_by_the_built_model() -> None:
    """The server would end with exit code 1; the build says it before."""
    facts = ModelFacts("x", size_bytes=1, context_length=4096)
    with pytest.raises(InvalidSpec, match="8192 tokens are more than the 4096"):
        SERVER.check_model(facts, SERVER.read_options({"max_model_len": 8192}))
    SERVER.check_model(facts, SERVER.read_options({"max_model_len": 4096}))


def test_every_field_is_an_option_of_the_pinned_version() -> None:
    """And everything that a file may not set is one of some version's."""
    for field in FIELDS:
        assert not field.flag or field.flag[2:] in PARSER.options, field.name
    known = PARSER.options.keys()
    assert {name for name in OURS if name not in known} <= {"log-config-file"}


@pytest.mark.parametrize(
    ("serve", "field", "says"),
    [
        ({"flags": {"max-logprob": 5}}, "serve.flags.max-logprob", "max-logprobs"),
        ({"flags": {"max-logprobs": "many"}}, "serve.flags.max-logprobs", "write a number"),
        ({"flags": {"max-logprobs": True}}, "serve.flags.max-logprobs", "text or a number"),
        ({"flags": {"async-scheduling": "on"}}, "serve.flags.async-scheduling", "true or false"),
        ({"flags": {"no-async-scheduling": True}}, "serve.flags.no-async-scheduling", "= false"),
        ({"flags": {"compilation-config": "{"}}, "serve.flags.compilation-config", "image"),
        ({"flags": {"scheduling-policy": "lifo"}}, "serve.flags.scheduling-policy", "fcfs"),
        ({"flags": {"seed": [1, 2]}}, "serve.flags.seed", "text or a number"),
        ({"kv_cache_dtype": "fp9"}, "serve.kv_cache_dtype", "fp8"),
        ({"tool_call_parser": "mistrall"}, "serve.tool_call_parser", '"mistral"'),
        ({"reasoning_parser": "deepsek_r1"}, "serve.reasoning_parser", "deepseek_r1"),
    ],
)
def test_a_bad_command_is_refused_by_the_options_of_the_pinned_version(
    serve: Any, field: str, says: str
) -> None:
    """What vLLM ends with exit code 2 for, and parsers that it ends with 1 for."""
    with pytest.raises(InvalidSpec) as caught:
        check_command(serve, PARSER)
    assert caught.value.details["field"] == field
    assert says in caught.value.remedy


def test_a_list_of_options_that_is_none_is_refused() -> None:
    """It is data from another environment."""
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_parser({"options": [{"names": ["x"]}]})


def test_the_catalog_knows_it() -> None:
    """By its kind."""
    assert engine("vllm") is ENGINE
