"""The graphs of models: fewer layers are built than a model has, and nothing is lost by it."""

from __future__ import annotations

import pytest

from mmadmin.core.engines.llama_server import graphs as llama_graphs
from mmadmin.core.engines.llama_server.graphs import built_layers
from mmadmin.core.engines.llama_server.memory import compute_buffers
from mmadmin.core.engines.llama_server.weights import place_layers
from mmadmin.core.fit.estimate import Device
from tests.core.formats.gguf.tables import llama
from tests.support.llama import run_shape

SIZES = {
    "layers": 48,
    "embedding": 512,
    "feed_forward": 1024,
    "heads": 8,
    "kv_heads": 2,
    "head_size": 64,
    "vocabulary": 4096,
}
SHAPES = {
    "llama": llama(**SIZES),
    "window": llama(**SIZES, arch="gemma3", **{"attention.sliding_window": 512}),
    "latent": llama(
        **(SIZES | {"kv_heads": 1, "head_size": 160}),
        arch="deepseek2",
        **{"attention.key_length_mla": 96, "attention.value_length_mla": 64},
    ),
}
RUNS = (
    run_shape(context=4096, slots=2),
    run_shape(context=2048, flash_attention=False),
    run_shape(context=4096, gpu_layers=20, cache_type_k="q8_0", cache_type_v="q8_0"),
)
CARD = Device(80, 80 << 30, 79 << 30)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("devices", [0, 1, 3])
def test_a_part_of_the_layers_decides(
    name: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute buffers are those of the whole graph, to the byte."""
    shape = SHAPES[name]
    for run in RUNS:
        where = place_layers(shape, run, [CARD] * devices)
        short = compute_buffers(shape, run, where, devices)
        monkeypatch.setattr(llama_graphs, "LAYERS_A_DEVICE", 1000)
        assert compute_buffers(shape, run, where, devices) == short
        monkeypatch.undo()


def test_the_layers_that_are_built() -> None:
    """The first ones of each device, and the last of all."""
    limit = llama_graphs.LAYERS_A_DEVICE
    devices = {i: 0 if i < 30 else 1 for i in range(61)}
    assert built_layers(60, devices) == [*range(limit), *range(30, 30 + limit), 59]
    assert built_layers(3, devices) == [0, 1, 2]
