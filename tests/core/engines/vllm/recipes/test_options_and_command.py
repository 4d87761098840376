"""`vllm-options` and `vllm-command`: a version's options as data, and a table checked by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.canonical import parse
from mmadmin.core.engines.vllm.recipes.vllm_command import RECIPE as COMMAND
from mmadmin.core.engines.vllm.recipes.vllm_options import PROGRAM, program_digest
from mmadmin.core.engines.vllm.recipes.vllm_options import RECIPE as OPTIONS
from mmadmin.core.errors import InvalidSpec, StepFailed
from tests.support.tools import NoTools

GOLDEN = Path(__file__).parents[1] / "golden" / "options-0.32.0.json"


class Answering(NoTools):
    """Hands that run no program: it has written `answer` where it was asked to."""

    answer: bytes = b""
    asked: tuple[Sequence[str], Mapping[str, str]] = ((), {})

    def run(self, argv: Sequence[str], *, env: Any = None, **more: Any) -> None:
        """Keep the command, write the answer."""
        self.asked = (argv, env or {})
        Path(argv[-1]).write_bytes(self.answer)


@pytest.fixture
def tools(tmp_path: Path) -> Answering:
    """Hands whose program answers with the options of vLLM 0.32.0."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = Answering(scratch)
    made.answer = GOLDEN.read_bytes()
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty output folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def options(tools: Answering, out: Path, folder: Path) -> Path:
    """The output of `vllm-options`."""
    params = {"program": program_digest()}
    OPTIONS.check(params)
    OPTIONS.build(params, {"environment": folder}, out, tools)
    return out


def test_the_environments_own_parser_is_asked(tools: Answering, out: Path, tmp_path: Path) -> None:
    """By the script, in the environment, without network; the answer is kept."""
    made = options(tools, out, tmp_path / "environment")
    argv, env = tools.asked
    assert str(PROGRAM) in argv
    assert env["PYTHONPATH"] == str(tmp_path / "environment" / "site")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert parse((made / "options.json").read_bytes()) == parse(GOLDEN.read_bytes())
    assert tools.lines == ["316 options"]


@pytest.mark.parametrize("answer", [b"", b"no JSON", b'{"options": []}'])
def test_an_answer_of_another_form_ends_the_step(
    tools: Answering, out: Path, tmp_path: Path, answer: bytes
) -> None:
    """It is data of another environment."""
    tools.answer = answer
    with pytest.raises(StepFailed, match="did not say which options"):
        options(tools, out, tmp_path)


def test_a_table_is_checked_and_kept(tools: Answering, out: Path, tmp_path: Path) -> None:
    """A table of another version's options is refused by its field."""
    known = options(tools, tmp_path / "scratch", tmp_path)
    COMMAND.build({"serve": {"max_model_len": 1024}}, {"options": known}, out, tools)
    assert parse((out / "serve.json").read_bytes()) == {"max_model_len": 1024}
    wrong: dict[str, Any] = {"serve": {"flags": {"max-logprob": 5}}}
    with pytest.raises(InvalidSpec, match=r"serve\.flags\.max-logprob"):
        COMMAND.build(wrong, {"options": known}, out, tools)
