"""The memory model against the real engine: what it logs while it loads a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fit import serve_once
from mmadmin.core.engines.llama_server.engine import ENGINE, Seat
from mmadmin.core.engines.protocol import System
from mmadmin.core.fit.estimate import compare_buffers
from mmadmin.core.formats.gguf.header import read_header
from mmadmin.core.formats.gguf.shape import shape_of_headers
from mmadmin.host.facts import host_facts
from tests.support.engine import EngineStore


@pytest.mark.engine
def test_a_real_model_takes_what_was_predicted(engine_store: EngineStore, tmp_path: Path) -> None:
    """Weights, cache and compute buffers of SmolLM2 are within 3 % of the engine's own numbers."""
    options = {"context": 2048, "slots": 2, "gpu_layers": 0, "flags": {"verbosity": 4}}
    system = System(
        parts={"engine": engine_store.path("engine"), "model": engine_store.model},
        options=ENGINE.read_options(options),
        engine_kind="llama-server",
        alias="smollm2",
    )
    launch = ENGINE.launch(system, Seat(str(tmp_path / "engine.sock")))
    lines = serve_once(list(launch.argv), {**launch.env, launch.secret_env: "test"})
    made = ENGINE.memory.estimate(
        shape_of_headers([read_header(engine_store.model)]),
        system.options,
        cpu_features=host_facts().cpu_features,
    )
    measured = ENGINE.memory.measured_buffers(lines)
    rows = {row.part: row for row in compare_buffers(made, measured)}
    assert {"host mapped", "host cache", "host compute"} <= set(rows)
    for part in ("host mapped", "host cache", "host compute"):
        assert abs(rows[part].error_permille) <= 30, rows[part]
