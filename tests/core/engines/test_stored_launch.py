"""Launches as JSON: what a replica was started with is read back as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.engines.protocol import Capabilities, Expectation, LaunchSpec
from mmadmin.core.engines.stored_launch import is_stored, launch_as_json, launch_from_json
from mmadmin.core.errors import InvalidSpec

LAUNCH = LaunchSpec(
    engine_kind="llama-server",
    argv=["/store/engine/bin/llama-server", "--host", "/run/engine.sock"],
    env={"CUDA_VISIBLE_DEVICES": "GPU-1"},
    secret_env="LLAMA_API_KEY",
    expect=Expectation(
        alias="chat",
        task="embedding",
        slots=2,
        context_per_slot=4096,
        model_file="/store/model/m.gguf",
        template_path="/store/template/t.jinja",
        capabilities=Capabilities(images=True, tools=False, reasoning=True),
    ),
    questions=QUESTIONS,
    load_deadline_s=300,
    socket="/run/engine.sock",
    help_argv=["/store/engine/bin/llama-server", "--help"],
    readable=["/opt/python"],
)


def test_a_launch_comes_back_from_json_as_it_was() -> None:
    """Every field, the questions by the kind of engine."""
    text = json.dumps(launch_as_json(LAUNCH))
    assert launch_from_json(json.loads(text)) == LAUNCH


def test_a_record_of_an_engine_on_a_tcp_port_is_none() -> None:
    """As version 0.1 wrote it: such an engine is planned and started anew."""
    assert is_stored(launch_as_json(LAUNCH))
    assert not is_stored({"argv": ["/store/engine/bin/llama-server", "--port", "21000"]})
    assert not is_stored({})


def test_an_engine_that_is_no_longer_installed_is_named() -> None:
    """Its running engine cannot be asked anything."""
    record = launch_as_json(replace(LAUNCH, engine_kind="gone"))
    with pytest.raises(InvalidSpec, match="gone"):
        launch_from_json(record)
