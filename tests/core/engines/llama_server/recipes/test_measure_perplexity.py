"""measure-perplexity: the report has the program's own numbers; quantizations are ranked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mmadmin.core import catalog
from mmadmin.core.build.derivation import thawed
from mmadmin.core.build.recipe import Json, PathSource
from mmadmin.core.engines.llama_server.recipes.measure_perplexity import RECIPE
from mmadmin.core.engines.protocol import MeasuresText, TextMeasure
from mmadmin.core.errors import InvalidDerivation, StepFailed
from mmadmin.core.evaluation.text import read_report
from mmadmin.core.spec.lock import LockedFile
from mmadmin.host.facts import host_facts
from tests.support.engine import LOCK, MODEL_FILE, catalog_spec
from tests.support.models import make_model
from tests.support.tools import Attempt, attempt

PARAMS: dict[str, Json] = {"file": MODEL_FILE, "text": "text.txt", "context": 128}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({**PARAMS, "context": 500}, "one of 128, 256"),
        ({**PARAMS, "chunks": -1}, "a whole number"),
        ({**PARAMS, "text": "../text.txt"}, "a plain relative path"),
        ({**PARAMS, "threads": 4}, "unknown fields: threads"),
        ({"file": "m.gguf", "text": "t"}, "lacks context"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Each field by its name, with what it takes."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)


def test_the_step_of_a_deployment(tmp_path: Path) -> None:
    """The same source and flags as the engine's, another target; the text by its digest."""
    engine = catalog.engine("llama-server")
    assert isinstance(engine, MeasuresText)
    text = LockedFile("text.txt", "a" * 64, 5, PathSource("/data/text.txt"))
    measure = TextMeasure(text, context=256)
    facts = host_facts(tmp_path)
    found = engine.text_report(catalog_spec(), LOCK, facts, measure)
    served = engine.parts(catalog_spec(), LOCK, facts).inputs
    program = found.inputs["engine"]
    assert found.params == {"file": MODEL_FILE, "text": "text.txt", "context": 256}
    assert found.inputs["model"] == served["model"]
    assert program.inputs == served["engine"].inputs
    assert {k for k, v in program.params.items() if v != served["engine"].params[k]} == {"targets"}
    assert thawed(program.params)["targets"] == ["llama-perplexity"]
    other = TextMeasure(LockedFile("text.txt", "b" * 64, 5, text.source), context=256)
    assert engine.text_report(catalog_spec(), LOCK, facts, other).digest != found.digest


def test_an_engine_that_cannot_measure() -> None:
    """Perplexity is an optional part of an engine."""
    assert not isinstance(catalog.engine("vllm"), MeasuresText)


RECORDED = """\
0.03.790.687 I perplexity: tokenizing the input ..
0.03.822.653 I perplexity: calculating perplexity over 16 chunks, n_ctx=128, batch_size=2048, n_seq=16
0.37.894.035 I perplexity: 34.07 seconds per pass - ETA 0.57 minutes
       0  53.2747  3.975461  0.465075
       0  37.1116  3.613929  0.338771
       0  31.9171  3.463143  0.275300
       0  25.2462  3.228675  0.235969
       0  30.5313  3.418751  0.208759
       0  34.7039  3.546852  0.190120
       0  37.8307  3.633121  0.172462
       0  39.5715  3.678108  0.163630
       0  39.9890  3.688604  0.151177
       0  46.6604  3.842897  0.143631
       0  46.1569  3.832046  0.135538
       0  45.2447  3.812086  0.129225
       0  45.0272  3.807267  0.123656
       0  46.2986  3.835111  0.119237
       0  48.3731  3.878943  0.116322
       0  47.3808  3.858218  0.112320

0.38.216.409 I Final estimate: PPL = 47.3808 +/- 5.32181
"""
"""What llama-perplexity of release 11434 prints, of SmolLM2 on pages of these docs."""


def measured(folder: Path, output: str) -> tuple[Attempt, Path]:
    """An attempt with a program that prints `output`, and the object's folder."""
    for name in ("model", "engine/bin", "text"):
        (folder / name).mkdir(parents=True)
    make_model(folder / "model/m.gguf")
    (folder / "text/text.txt").write_text("Some words.", encoding="utf-8")
    program = folder / "engine/bin/llama-perplexity"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n", encoding="utf-8")
    program.chmod(0o755)
    work = attempt(folder / "work")
    inputs = {name: folder / name for name in ("model", "engine", "text")}
    return work, work.build(RECIPE, {**PARAMS, "file": "m.gguf"}, **inputs)


def test_the_report_has_the_programs_own_numbers(tmp_path: Path) -> None:
    """To the printed digits; the chunks' mean gives the same perplexity."""
    work, out = measured(tmp_path, RECORDED)
    report = read_report(out)
    assert (report.perplexity, report.standard_error) == ("47.3808", "5.32181")
    assert math.exp(report.mean_nll) == pytest.approx(47.3808, abs=1e-4)
    assert report.chunk_nll[1] == pytest.approx(2 * 3.613929 - 3.975461)
    assert work.progress[-1] == (16, 16, "chunks")


@pytest.mark.parametrize("lost", ["Final estimate", "31.9171"])
def test_output_without_every_number_is_no_report(tmp_path: Path, lost: str) -> None:
    """Too short a text ends with exit code 0; the message says how long it must be."""
    lines = [line for line in RECORDED.splitlines(keepends=True) if lost not in line]
    with pytest.raises(StepFailed) as caught:
        measured(tmp_path, "".join(lines))
    assert "at least 256 tokens" in str(caught.value.remedy)
