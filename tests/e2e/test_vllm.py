"""A checkpoint goes the whole way with vLLM on a CPU: served, quantized, swapped, rolled back.

The stand-in has the architecture of Mistral Medium 3.5, text and vision layers with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mmadmin.core.formats.checkpoint.parts import QUANTIZER, REQUIREMENTS
from mmadmin.core.recipes import python_env
from tests.e2e.installation import PATIENCE_S, Installation, installation
from tests.support.engine import EngineStore, cache_root
from tests.support.quantizer import Quantizer, open_quantizer, quantizer_lock
from tests.support.vllm_engine import deployment, open_vllm, seed

NAME = "standin"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def quantizer() -> Quantizer:
    """The stand-in, and what quantizes it."""
    return open_quantizer()


@pytest.fixture(scope="module")
def site(
    engine_store: EngineStore, quantizer: Quantizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """An installation whose store has both environments."""
    assert quantizer.environment.exists()
    engine = open_vllm()
    locked = quantizer_lock(cache_root())
    goals = {
        "options": engine.options,
        "environment": engine.options.inputs["environment"],
        "quantizer": python_env.derivation(locked, QUANTIZER, REQUIREMENTS),
    }
    for made in installation(tmp_path_factory.mktemp("vllm"), engine_store):
        seed(engine.store, made.store(), goals)
        yield made


def file(folder: Path, quantizer: Quantizer, model: str = "", serve: str = "") -> Path:
    """A deployment file of the stand-in."""
    path = folder / f"{NAME}.toml"
    source = (
        f'source = "path"\npath = "{quantizer.bf16 / "config.json"}"\n'
        f'leave_out = ["tekken.json"]\n{model}'
    )
    images = "limit_mm_per_prompt = { image = 0 }\n"
    path.write_text(deployment(source, images + serve, NAME) + '\n[activation]\nmode = "swap"\n')
    return path


def chat(site: Installation, key: str, **body: Any) -> httpx2.Response:
    """One chat completion through the gate."""
    return httpx2.post(
        f"{site.gate}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": NAME, "max_tokens": 8, "temperature": 0, **body},
        timeout=PATIENCE_S,
        trust_env=False,
    )


def check_answers(site: Installation, key: str) -> None:
    """Chat, stream with usage, and what is wrong with a request."""
    hello: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
    answer = chat(site, key, messages=hello).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 8
    with httpx2.stream(
        "POST",
        f"{site.gate}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": NAME, "messages": hello, "max_tokens": 8, "stream": True},
        timeout=PATIENCE_S,
        trust_env=False,
    ) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data:")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 4
    long = chat(site, key, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.status_code == httpx2.codes.BAD_REQUEST
    assert "context" in long.json()["error"]["message"], long.text


def test_a_checkpoint_is_served_quantized_swapped_and_rolled_back(
    site: Installation, quantizer: Quantizer, tmp_path: Path
) -> None:
    """By Celery, through the gate, with a client's key."""
    plan = site.json("plan", str(file(tmp_path, quantizer)))
    assert {step["recipe"] for step in plan["steps"]} == {
        *("fetch", "python-env", "vllm-options", "vllm-command", "verify-checkpoint", "system")
    }
    states = {step["recipe"]: step["action"] for step in plan["steps"]}
    assert (states["python-env"], states["vllm-options"]) == ("cached", "cached")

    wrong = file(tmp_path, quantizer, serve="[serve.flags]\nmax-logprob = 5")
    refused = site.json("deploy", str(wrong), "--reason", "a typo", code=1)
    assert "max-logprobs" in json.dumps(refused)

    first = site.json("deploy", str(file(tmp_path, quantizer)), "--reason", "as published")
    assert first["state"] == "live"
    key, number = site.key(), first["number"]
    assert site.answered(key, NAME) == f"{NAME}/{number}"
    check_answers(site, key)

    small = file(tmp_path, quantizer, 'quantize = "FP8_DYNAMIC"\nignore = ["re:.*lm_head"]')
    second = site.json("deploy", str(small), "--reason", "half the memory")
    assert second["state"] == "live"
    assert site.answered(key, NAME) == f"{NAME}/{second['number']}"
    check_answers(site, key)

    back = site.json("rollback", NAME, "--reason", "more precise")
    assert (back["target"], back["state"]) == (number, "succeeded")
    assert site.answered(key, NAME) == f"{NAME}/{number}"


def test_an_engine_that_does_not_start_says_why(
    site: Installation, quantizer: Quantizer, tmp_path: Path
) -> None:
    """With the error that vLLM logged, not its last line; the live generation answers again."""
    key = site.key()
    before = site.answered(key, NAME)
    wrong = file(tmp_path, quantizer, serve='[serve.flags]\nquantization = "awq"')
    failed = site.json("deploy", str(wrong), "--reason", "not what it is", code=1)
    assert "Cannot find the config file for awq" in failed["error"]["message"]
    assert site.answered(key, NAME) == before
