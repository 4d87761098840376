"""Perplexity by the real program: its own digits, and quantizations in the right order."""

from __future__ import annotations

import pydoc_data.topics
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import PathSource
from mmadmin.core.engines.llama_server.engine import ENGINE
from mmadmin.core.engines.llama_server.recipes.measure_perplexity import PROGRAM, RECIPE
from mmadmin.core.engines.protocol import TextMeasure
from mmadmin.core.evaluation.text import TextReport, compare, read_report
from mmadmin.core.spec.lock import LockedFile
from mmadmin.host.facts import host_facts
from tests.support.engine import LOCK, EngineStore, catalog_spec, toolbox_for
from tests.support.tools import attempt

pytestmark = pytest.mark.engine
CONTEXT, CHUNKS = 128, 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prose."""
    folder = tmp_path_factory.mktemp("corpus")
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    (folder / "text.txt").write_text(text[:40_000])
    return folder


class Measuring:
    """What measures, and what is measured, from the test cache."""

    def __init__(self, engine: EngineStore, corpus: Path, work: Path, quantize: str) -> None:
        self.cache, self.corpus, self.work = engine.store, corpus, work
        spec = catalog_spec()
        spec = replace(spec, model=replace(spec.model, quantize=quantize))
        source = PathSource(str(corpus / "text.txt"))
        measure = TextMeasure(LockedFile("text.txt", "a" * 64, 1, source), CONTEXT, CHUNKS)
        self.step = ENGINE.text_report(spec, LOCK, host_facts(engine.store.root), measure)

    def made(self, step: Derivation) -> Path:
        """The object of a step, built where the cache lacks it."""
        realise(step, self.cache, toolbox_for(self.cache), UNOBSERVED)
        name = Outputs(self.cache).of(step).object
        assert name is not None
        return self.cache.object_path(name)

    def report(self) -> TextReport:
        """Measured now."""
        inputs = {name: self.made(self.step.inputs[name]) for name in ("model", "engine")}
        made = attempt(self.work).build(RECIPE, self.step.params, text=self.corpus, **inputs)
        return read_report(made)


@pytest.mark.timeout(1800)
def test_quantizations_are_ranked(engine_store: EngineStore, corpus: Path, tmp_path: Path) -> None:
    """Two bits are worse beyond chance; eight bits of a four-bit file change next to nothing."""
    found = {
        quant: Measuring(engine_store, corpus, tmp_path / (quant or "whole"), quant).report()
        for quant in ("", "Q8_0", "Q2_K")
    }
    assert {len(report.chunk_nll) for report in found.values()} == {CHUNKS}
    small = compare(found["Q2_K"], found[""])
    assert small.verdict == "worse"
    assert small.perplexity_change_percent.low > 1
    same = compare(found["Q8_0"], found[""]).perplexity_change_percent
    assert abs(same.estimate) < 1
    assert same.low < same.estimate < same.high


@pytest.mark.timeout(1800)
def test_the_program_s_own_digits(engine_store: EngineStore, corpus: Path, tmp_path: Path) -> None:
    """What it prints when it is run by hand."""
    one = Measuring(engine_store, corpus, tmp_path / "a", "")
    report = one.report()
    program = one.made(one.step.inputs["engine"]) / PROGRAM
    argv = [program, "-m", engine_store.model, "-f", corpus / "text.txt", "-c", str(CONTEXT)]
    done = subprocess.run(
        [*argv, "--chunks", str(CHUNKS), "-ngl", "0", "-t", "2"],
        check=True,
        capture_output=True,
        text=True,
    )
    final = re.search(r"PPL = (\S+) \+/- (\S+)", done.stdout + done.stderr)
    assert final is not None
    assert (report.perplexity, report.standard_error) == final.groups()
