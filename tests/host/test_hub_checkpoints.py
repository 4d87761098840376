"""Looking at a checkpoint repository of the hub without downloading it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.host.fit import offers
from mmadmin.host.hub import Hub
from mmadmin.host.hub_browser import browse, read_header, read_template
from mmadmin.host.policy import Policy
from tests.support.checkpoints import config, hollow
from tests.support.hub import Hollow, LocalHub, local_hub, size_of

LAYERS, VISION_LAYERS, SHARDS = 88, 48, 27
REPO = "team/Medium-128B"


@pytest.fixture
def local() -> Iterator[LocalHub]:
    """A running hub."""
    with local_hub() as running:
        yield running


def hub_of(local: LocalHub) -> Hub:
    """A hub that does not wait long."""
    return Hub(local.url, None, Policy(backoff_s=0.01, attempts=2))


def medium() -> dict[str, bytes | Hollow]:
    """The files of a 128B model in FP8: 27 shards of nearly 5 GB."""
    linear = {
        "self_attn.q_proj": (12288, 12288),
        "self_attn.k_proj": (1024, 12288),
        "self_attn.v_proj": (1024, 12288),
        "self_attn.o_proj": (12288, 12288),
        "mlp.gate_proj": (28672, 12288),
        "mlp.up_proj": (28672, 12288),
        "mlp.down_proj": (12288, 28672),
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "lm_head.weight": ("BF16", (131072, 12288)),
        "model.language_model.embed_tokens.weight": ("BF16", (131072, 12288)),
    }
    for n in range(3):
        found[f"model.multi_modal_projector.linear_{n}.weight"] = ("BF16", (1664, 1664))
    for n in range(VISION_LAYERS):
        at = f"model.vision_tower.transformer.layers.{n}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{at}.attention.{name}.weight"] = ("BF16", (1664, 1664))
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{at}.feed_forward.{name}.weight"] = ("BF16", (8192, 1664))
    for n in range(LAYERS):
        for name, size in linear.items():
            at = f"model.language_model.layers.{n}.{name}"
            found[f"{at}.weight"] = ("F8_E4M3", size)
            found[f"{at}.weight_scale_inv"] = ("BF16", ())
            found[f"{at}.activation_scale"] = ("BF16", ())
    names, files, weight_map = list(found), {}, {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = {name: found[name] for name in names[number::SHARDS]}
        files[file] = hollow(part)
        weight_map.update(dict.fromkeys(part, file))
    text = {
        **config()["text_config"],
        "num_hidden_layers": LAYERS,
        "hidden_size": 12288,
        "intermediate_size": 28672,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    }
    quantized = {"quant_method": "fp8", "activation_scheme": "static"}
    return {
        **files,
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "config.json": json.dumps(config(text_config=text, quantization_config=quantized)).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "tekken.json": b"{}" * 4000,
    }


def test_headers_of_27_shards_cost_little(local: LocalHub) -> None:
    """Config, index and every tensor of 125 GB: some megabytes, and the listing says what it is."""
    files = medium()
    local.repo(REPO).commit(files)
    listing = browse(hub_of(local), REPO)
    (one,) = listing.sets
    assert (one.label, one.kind, one.shards) == ("model", "model", SHARDS)
    assert one.size_bytes == sum(size_of(content) for content in files.values()) > 120e9
    glimpse = read_header(hub_of(local), listing.repo, listing.commit, one)
    assert glimpse.bytes_read < 8_000_000
    header = glimpse.header
    assert isinstance(header, CheckpointShape)
    assert header.layers == LAYERS
    language = LAYERS * (2 * 12288**2 + 2 * 1024 * 12288 + 3 * 28672 * 12288) + 2 * 131072 * 12288
    vision = VISION_LAYERS * (4 * 1664**2 + 3 * 8192 * 1664) + 3 * 1664**2
    assert header.parameters == language + vision, "scales are no parameters"
    assert header.quantization is not None
    assert header.quantization.label == "fp8 w8a8-fp8"
    assert header.quantization.static_activations
    template = read_template(hub_of(local), listing.repo, listing.commit, one)
    assert template == "{{ messages }}"


def test_a_hostile_header_costs_one_range(local: LocalHub) -> None:
    """A shard that announces a header of exabytes is refused after its first bytes."""
    files = {**medium()}
    files["model-00002-of-00027.safetensors"] = Hollow(b"\xff" * 8, 5_000_000_000)
    local.repo(REPO).commit(files)
    listing = browse(hub_of(local), REPO)
    with pytest.raises(InvalidModel, match="model-00002-of-00027"):
        read_header(hub_of(local), listing.repo, listing.commit, listing.sets[0])
    assert local.sent < 2_000_000


def test_a_repository_of_checkpoints_is_offered_or_explained(local: LocalHub) -> None:
    """What no engine here loads is listed with that reason; nothing fails."""
    local.repo(REPO).commit(medium())
    found = offers(hub_of(local), REPO, "main", [])
    assert [one["name"] for one in found["sets"]] == ["model"]  # type: ignore[union-attr, call-overload, index]
    assert found["offers"] or "no engine here loads a checkpoint" in str(found["notes"])
