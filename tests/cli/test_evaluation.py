"""`mm eval`: what it prints of reports, and what it refuses."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmadmin.cli import build, evaluation
from mmadmin.cli.main import app
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import PathSource
from mmadmin.core.engines.llama_server import measuring
from mmadmin.core.errors import Refused
from mmadmin.core.evaluation.text import TextReport
from mmadmin.core.home import Home
from mmadmin.core.spec.lock import LockedFile, lock_as_json
from mmadmin.core.spec.questions import questions
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.spec.steps import fetch, step
from mmadmin.core.store import Store
from tests.support.engine import CATALOG, LOCK, EngineStore

SMALL = str(CATALOG / "smollm2-135m.toml")
VLLM = next(
    str(file)
    for file in sorted(CATALOG.glob("*.toml"))
    if 'kind = "vllm"' in file.read_text(encoding="utf-8")
)
REFERENCE = [2.0, 3.0] * 8


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A text to predict, in a home of its own."""
    monkeypatch.setenv("MM_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("Some words.", encoding="utf-8")
    return str(tmp_path / "text.txt")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """NLLs of chunks by deployment file: what the engine would have measured."""
    known: dict[str, list[float]] = {"large.toml": REFERENCE}

    def measured(
        file: Path, _text: Path, context: int, _chunks: int, *, quiet: bool
    ) -> tuple[str, Path, TextReport]:
        del quiet
        nlls = known[file.name]
        report = TextReport("a" * 64, "t", context, "12.1825", "0.10000", nlls)
        return file.stem, Path("/store/objects/r"), report

    monkeypatch.setattr(evaluation, "_measured", measured)
    return known


def mm(*words: str) -> str:
    """Run a command; its stdout."""
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_a_run_prints_the_programs_numbers(text: str, reports: dict[str, list[float]]) -> None:
    """As printed, with the sample's size."""
    assert reports
    said = mm("eval", "run", "large.toml", "--text", text)
    assert "large perplexity 12.1825 ± 0.10000, mean NLL 2.5000 (16 chunks of 512 tokens)" in said
    document = json.loads(mm("eval", "run", "large.toml", "--text", text, "--json"))
    assert document["perplexity"] == "12.1825"
    assert document["mean_nll"] == 2.5


@pytest.mark.parametrize(
    ("nlls", "words"),
    [
        ([nll + 0.1 for nll in REFERENCE], "The first is worse: +10.52 % perplexity (95 %: +10.52"),
        ([nll - 0.1 for nll in REFERENCE], "The first is better: -9.52 %"),
        (REFERENCE, "No difference seen at this sample size, 16 chunks: +0.00 %"),
    ],
)
def test_a_comparison_names_a_winner_only_where_there_is_one(
    text: str, reports: dict[str, list[float]], nlls: list[float], words: str
) -> None:
    """The sentence has the change and its interval; the document has the same."""
    reports["small.toml"] = nlls
    assert words in mm("eval", "compare", "small.toml", "large.toml", "--text", text)
    document = json.loads(
        mm("eval", "compare", "small.toml", "large.toml", "--text", text, "--json")
    )
    assert document["verdict"] in words.lower()
    assert document["model"]["name"] == "small"
    assert document["reference"]["name"] == "large"


def test_an_engine_without_this_measure_is_refused(text: str) -> None:
    """Before anything is resolved or built."""
    with pytest.raises(Refused, match="perplexity is not measured for vllm"):
        CliRunner().invoke(app, ["eval", "run", VLLM, "--text", text], catch_exceptions=False)


@pytest.mark.engine
def test_from_file_and_text_to_a_report_in_the_store(
    tmp_path: Path, text: str, engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for llama-perplexity prints what it would; the second run measures nothing."""
    home = Home(tmp_path / "home")
    lock = build.lock_file(home, "smollm2-135m")
    lock.parent.mkdir(parents=True)
    spec = parse_spec(Path(SMALL).read_text(encoding="utf-8"))
    lock.write_text(json.dumps(lock_as_json(LOCK) | {"asked": questions(spec)}), encoding="utf-8")
    home.store.mkdir()
    engine_store.seed(Store(home.store))
    program, calls = stand_in(tmp_path)
    monkeypatch.setattr(measuring, "perplexity_program", lambda *_asked: program)

    words = ("eval", "run", SMALL, "--text", text, "--context", "128", "--json")
    first = json.loads(mm(*words))
    assert first["perplexity"] == "12.1825"
    assert first["chunks"] == 2
    assert first["text_sha256"] == hashlib.sha256(b"Some words.").hexdigest()
    assert (Path(first["path"]) / "report.json").is_file()
    assert json.loads(mm(*words)) == first
    assert len(calls()) == 1
    Path(text).write_text("Other words.", encoding="utf-8")
    assert json.loads(mm(*words))["path"] != first["path"]
    assert len(calls()) == 2


def stand_in(folder: Path) -> tuple[Derivation, Callable[[], list[Path]]]:
    """An engine object whose llama-perplexity prints fixed numbers, and the logs of its runs."""
    script = """#!/bin/sh
echo 'perplexity: calculating perplexity over 2 chunks, n_ctx=128, batch_size=2048, n_seq=16'
echo '       0  7.3891  2.000000  0.100000'
echo '       0  12.1825  2.500000  0.100000'
echo 'Final estimate: PPL = 12.1825 +/- 0.10000'
"""
    archive = folder / "program.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("bin/llama-perplexity")
        member.size, member.mode = len(script), 0o755
        tar.addfile(member, io.BytesIO(script.encode()))
    data = archive.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    source = LockedFile(archive.name, sha256, len(data), PathSource(str(archive)))
    inputs = {"archive": fetch("program", [source])}
    program = step("unpack", "program", {"subtree": "", "members": []}, inputs)
    logs = folder / "home" / "store" / "logs"
    return program, lambda: [p for p in logs.rglob("*") if "2 chunks" in p.read_text()]
