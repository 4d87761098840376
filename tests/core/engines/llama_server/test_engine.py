"""llama-server: options to argv, by golden files; refusals before the server is started."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from mmadmin.core.catalog import engine
from mmadmin.core.engines.llama_server.engine import LlamaServer
from mmadmin.core.engines.llama_server.fields import FIELDS
from mmadmin.core.engines.llama_server.flags import BY_NAME, FLAGS, OURS
from mmadmin.core.engines.protocol import Capabilities, ModelFacts, Seat, System
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.spec.fields import read_table
from mmadmin.core.spec.spec import parse_spec

GOLDEN = Path(__file__).parent / "golden"
CATALOG = Path(__file__).parents[4] / "deployments" / "catalog"
SERVER = LlamaServer()
SYSTEM = System(
    parts={"engine": Path("/store/engine"), "model": Path("/store/model/model.gguf")},
    options=SERVER.read_options({}),
    engine_kind="llama-server",
    alias="model",
    facts=ModelFacts(architecture="llama", size_bytes=0, context_length=32768),
)
SEED = """
llama-server
--model /store/model/model.gguf
--host /run/engine.sock
--ctx-size 65536
--n-gpu-layers 99
--tensor-split "8,8,8,8"
--parallel 1
--jinja
--chat-template-file /store/template/chat_template.jinja
--reasoning on
--reasoning-format deepseek
--temp 0.7
--top-p 0.95
--top-k 40
--alias mistral-medium-3.5
"""
"""The command of the walkthrough that this deployment replaces, without its key; on a socket."""


def launch(options, *, seat=None, system=SYSTEM):
    """The launch of some options, read as the parser reads them."""
    return SERVER.launch(
        replace(system, options=SERVER.read_options(options)), seat or Seat("/run/engine.sock")
    )


def refusal(options, **more) -> InvalidSpec:
    """How some options are refused."""
    with pytest.raises(InvalidSpec) as caught:
        launch(options, **more)
    return caught.value


def test_the_v100_deployment_has_the_seeds_command():
    """Word for word, but for the key (by environment) and the address (a socket)."""
    spec = parse_spec((CATALOG / "mistral-medium-3.5-v100.toml").read_text(encoding="utf-8"))
    system = replace(
        SYSTEM,
        parts={**SYSTEM.parts, "template": Path("/store/template/chat_template.jinja")},
        options=spec.serve,
        alias=spec.public_name,
        facts=ModelFacts("mistral3", 74_800_000_000, layers=88, context_length=262_144),
    )
    made = SERVER.launch(system, Seat("/run/engine.sock", devices=(0, 1, 2, 3)))
    assert made.argv == ["/store/engine/bin/llama-server", *shlex.split(SEED)[1:]]
    assert made.secret_env == "LLAMA_API_KEY"
    assert made.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert made.expect.context_per_slot == 65536
    assert 600 < made.load_deadline_s < 3600


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_argv_is_as_golden(path):
    """Options and seat of each golden file give exactly its argv, environment and context."""
    case = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    options = read_table(FIELDS, case["options"], "serve")
    parts = {name: Path(case[name]) for name in ("template", "mmproj") if name in case}
    seat = Seat("/run/engine.sock", devices=case.get("devices"))
    made = launch(options, seat=seat, system=replace(SYSTEM, parts={**SYSTEM.parts, **parts}))
    assert made.argv == case["argv"]
    assert made.env == case.get("env", {})
    assert made.expect.context_per_slot == case["context_per_slot"]
    assert made.expect.task == case.get("task", "completion")


@pytest.mark.parametrize(
    ("options", "trained", "shown"),
    [
        ({"context": 1024, "slots": 2}, 8192, 1024),
        ({"context": 1024, "slots": 2, "kv_unified": False}, 8192, 1024),
        ({"context": 1024, "slots": 2, "kv_unified": True}, 8192, 2048),
        ({"context": 8192, "slots": 2, "kv_unified": True}, 8192, 8192),
        ({"context": 1024, "slots": 2, "kv_unified": True}, 0, 2048),
    ],
)
def test_a_slot_of_a_unified_cache_shows_the_whole_context(options, trained, shown):
    """Up to what the model was trained with, where the server caps it."""
    facts = ModelFacts(architecture="llama", size_bytes=1, context_length=trained)
    made = launch(options, system=replace(SYSTEM, facts=facts))
    assert (made.expect.slots, made.expect.context_per_slot) == (2, shown)
    assert made.argv[made.argv.index("--ctx-size") + 1] == str(options["context"] * 2)


@pytest.mark.parametrize(
    ("options", "parts", "capabilities"),
    [
        ({}, {}, Capabilities()),
        ({"jinja": False}, {}, Capabilities(tools=False)),
        ({"reasoning": "on"}, {}, Capabilities(reasoning=True)),
        ({"reasoning_format": "none"}, {}, Capabilities(reasoning=True)),
        ({}, {"mmproj": Path("/store/mmproj/mmproj.gguf")}, Capabilities(images=True)),
    ],
)
def test_what_clients_may_ask_follows_from_options_and_parts(options, parts, capabilities):
    """The probes ask by this, not by the command."""
    made = launch(options, system=replace(SYSTEM, parts={**SYSTEM.parts, **parts}))
    assert made.expect.capabilities == capabilities


def test_every_named_field_stands_in_a_golden_file():
    """No option of [serve] is without a golden argv."""
    seen = {
        name for path in GOLDEN.glob("*.json") for name in json.loads(path.read_text())["options"]
    }
    assert {field.name for field in FIELDS} <= seen


def test_every_named_field_is_a_flag_of_the_server():
    """Field names map to long options that exist."""
    for field in FIELDS:
        if field.flag:
            assert field.flag.removeprefix("--") in BY_NAME
    assert set(OURS) <= {flag.name for flag in FLAGS}


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"slots": 4}, "serve.context", "tokens that one request may use"),
        ({"tensor_split": ["0", "0"]}, "serve.tensor_split", "add up to nothing"),
        ({"tensor_split": ["1", "1"], "gpu_layers": 0}, "serve.tensor_split", "off the GPUs"),
        ({"ubatch": 4096}, "serve.ubatch", "logical batch of 2048"),
        (
            {"cache_type_v": "q8_0", "flash_attention": "off"},
            "serve.cache_type_v",
            "needs flash attention",
        ),
        ({"embeddings": True, "reranking": True}, "serve.reranking", "not both"),
        ({"chat_template_kwargs": "[1]"}, "serve.chat_template_kwargs", "JSON object"),
        ({"flags": {"--warmup": True}}, "serve.flags.--warmup", "no dashes"),
        ({"flags": {"wramup": True}}, "serve.flags.wramup", 'did you mean "warmup"?'),
        ({"flags": {"no-warmup": True}}, "serve.flags.no-warmup", "write warmup = false"),
        ({"flags": {"ctx-size": 5}}, "serve.flags.ctx-size", "use serve.context"),
        ({"flags": {"n-gpu-layers": 5}}, "serve.flags.n-gpu-layers", "use serve.gpu_layers"),
        ({"flags": {"api-key": "x"}}, "serve.flags.api-key", "the gate holds the keys"),
        ({"flags": {"host": "0.0.0.0"}}, "serve.flags.host", "loopback"),
        ({"flags": {"tools": "all"}}, "serve.flags.tools", "hands on the host"),
        ({"flags": {"lora": "/x"}}, "serve.flags.lora", "nothing pins"),
        ({"flags": {"fim-qwen-7b-default": True}}, "serve.flags.fim-qwen-7b-default", "[model]"),
        ({"flags": {"warmup": 1}}, "serve.flags.warmup", "true or false"),
        ({"flags": {"check-tensors": False}}, "serve.flags.check-tensors", "no off form"),
        ({"flags": {"prio": True}}, "serve.flags.prio", "takes a value"),
        ({"flags": {"numa": "a\nb"}}, "serve.flags.numa", "one line"),
        ({"flags": {"cpu-strict": 2}}, "serve.flags.cpu-strict", "not one of its values"),
    ],
)
def test_bad_options_are_refused_before_launch(options, field, words):
    """What the server would refuse late, or take silently for something else."""
    error = refusal(options)
    assert error.details["field"] == field
    assert words in str(error)


def test_a_tensor_split_needs_a_share_for_each_gpu():
    """Three shares for four cards would leave one card empty without a word."""
    error = refusal(
        {"tensor_split": ["1"] * 3}, seat=Seat("/run/engine.sock", devices=(0, 1, 2, 3))
    )
    assert "3 shares for 4 GPUs" in str(error)


def test_context_above_the_models_own_is_refused():
    """The server would cap the slot in silence."""
    with pytest.raises(InvalidSpec, match="trained with"):
        SERVER.check_model(SYSTEM.facts, SERVER.read_options({"context": 65536}))
    SERVER.check_model(SYSTEM.facts, SERVER.read_options({"context": 32768}))
    overridden = {"context": 65536, "flags": {"override-kv": "x=int:1"}}
    SERVER.check_model(SYSTEM.facts, SERVER.read_options(overridden))


def test_an_own_template_needs_jinja():
    """Without Jinja the server takes only built-in templates."""
    system = replace(SYSTEM, parts={**SYSTEM.parts, "template": Path("/t.jinja")})
    error = refusal({"jinja": False}, system=system)
    assert error.details["field"] == "serve.jinja"


def test_the_secret_is_never_in_the_launch():
    """Neither argv nor environment has a place for it; the launcher adds it."""
    made = launch({"context": 1024})
    assert not [word for word in made.argv if "key" in word]
    assert made.secret_env not in made.env


def test_the_catalog_finds_it():
    """The module ends with the object that the catalog looks for."""
    assert isinstance(engine("llama-server"), LlamaServer)


def test_a_seat_shows_its_gpus_alone():
    """By UUID where all are known, else by index; no GPU of a seat is not every GPU."""
    known = Seat("/run/engine.sock", devices=(2, 0), uuids=("GPU-b", "GPU-a"))
    assert known.gpu_environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert replace(known, uuids=("GPU-b", "")).gpu_environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert replace(known, devices=(), uuids=()).gpu_environment["CUDA_VISIBLE_DEVICES"] == ""
    assert Seat("/run/engine.sock").gpu_environment == {}
