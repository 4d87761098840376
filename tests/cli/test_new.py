"""`mm new`: the first deployment file, by options and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmadmin.cli.new import new
from mmadmin.core.errors import InvalidInput, MmError, NotFound
from mmadmin.core.spec.first_file import first_name
from mmadmin.core.spec.spec import parse_spec
from tests.core.formats.gguf.tables import mistral_medium
from tests.host.test_hub_browser import header
from tests.support.hub import LocalHub, local_hub
from tests.support.models import make_model

REPO = "team/Tiny-Chat-GGUF"
BIG = "unsloth/Mistral-Medium-3.5-128B-GGUF"
app = typer.Typer()
app.command("new")(new)
PATIENCE_S = 30.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with a small model and one that fits no test machine; empty caches; a bare folder."""
    with local_hub() as running:
        (small,) = make_model(tmp_path / "small.gguf")
        running.repo(REPO).commit({f"tiny-{quant}.gguf": small for quant in ("Q4_0", "Q8_0")})
        weights = list(mistral_medium("Q4_K_M").weights)
        hollow = header(tmp_path / "h", weights, vocabulary=64, split=(0, 1, 0))
        running.repo(BIG).commit({"m-Q4_K_M.gguf": hollow})
        for name, value in {
            "HF_ENDPOINT": running.url,
            "HF_TOKEN_PATH": "/nonexistent",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "OLLAMA_MODELS": str(tmp_path / "ollama"),
            "MM_HOME": str(tmp_path / "home"),
        }.items():
            monkeypatch.setenv(name, value)
        work = tmp_path / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        yield running


def refused(*words: str) -> MmError:
    """What `mm new` refuses."""
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, MmError), error
    return error


def in_ollama(folder: Path, model: Path) -> Path:
    """A model in an Ollama store; its blob."""
    import hashlib

    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(model.read_bytes())
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return blob


def test_a_hub_repository_by_options(place: LocalHub) -> None:
    """The largest quant that fits, at the commit that was seen; the file parses and names a schema."""
    done = CliRunner().invoke(app, ["--hub", REPO, "--context", "512"])
    assert done.exit_code == 0, done.output
    text = Path("tiny-chat.toml").read_text(encoding="utf-8")
    assert text.startswith("#:schema http")
    spec = parse_spec(text)
    assert (spec.name, spec.model.repo, spec.model.quant) == ("tiny-chat", REPO, "Q8_0")
    assert len(spec.model.revision) == 40
    assert spec.serve.context == 512
    assert "wrote tiny-chat.toml" in done.output


def test_a_file_of_this_machine(place: LocalHub, tmp_path: Path) -> None:
    """By its path; as JSON for programs."""
    asked = ["--path", str(tmp_path / "small.gguf"), "--context", "512", "mine.toml", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["file"], said["name"], said["fit"]["ok"]) == ("mine.toml", "small", True)
    assert parse_spec(Path("mine.toml").read_text()).model.path == str(tmp_path / "small.gguf")


def test_a_model_of_ollama(place: LocalHub, tmp_path: Path) -> None:
    """By a part of its name; several or none are named."""
    blob = in_ollama(tmp_path / "ollama", tmp_path / "small.gguf")
    done = CliRunner().invoke(app, ["--cached", "tiny", "--context", "512"])
    assert done.exit_code == 0, done.output
    assert parse_spec(Path("tiny-1b.toml").read_text()).model.path == str(blob)
    error = refused("--cached", "other")
    assert isinstance(error, NotFound)
    assert "ollama tiny:1b" in error.remedy


def test_what_does_not_fit_is_said_and_written(place: LocalHub) -> None:
    """Ends with 1: the file can be changed."""
    done = CliRunner().invoke(app, ["--hub", BIG, "--quant", "Q4_K_M", "--context", "16000000"])
    assert done.exit_code == 1, done.output
    assert "does not fit" in done.output
    assert Path("mistral-medium-3.5-128b.toml").exists()


def test_errors_say_what_to_do(place: LocalHub, tmp_path: Path) -> None:
    """No source, two sources, no such quant or file, a file that is there."""
    assert "--hub REPO" in refused().remedy
    assert "one of --hub" in refused("--hub", REPO, "--path", "x").remedy
    assert "Q4_0, Q8_0" in refused("--hub", REPO, "--quant", "Q9").remedy
    assert isinstance(refused("--path", str(tmp_path / "none.gguf")), NotFound)
    Path("there.toml").touch()
    error = refused("there.toml", "--hub", REPO)
    assert isinstance(error, InvalidInput)
    assert "--force" in error.remedy
    assert Path("there.toml").read_text() == ""


def test_it_asks_on_a_terminal(place: LocalHub) -> None:
    """Repository, quant by its number, name: what fits is shown before."""
    code, said = typed(
        ["new", "--context", "512"],
        [
            ("the model comes from", "1"),
            ("repository", REPO),
            ("quant", "1"),
            ("name of the deployment", "mine"),
        ],
    )
    assert code == 0, said
    assert "fits" in said
    spec = parse_spec(Path("mine.toml").read_text(encoding="utf-8"))
    assert (spec.name, spec.model.quant) == ("mine", "Q4_0")


def typed(words: Sequence[str], answers: Sequence[tuple[str, str]]) -> tuple[int, str]:
    """Run `mm` on a terminal, type each answer when its question is there; exit code, output."""
    ours, theirs = pty.openpty()
    program = str(Path(sys.executable).with_name("mm"))
    child = subprocess.Popen(
        [program, *words], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ}
    )
    os.close(theirs)
    said, seen, deadline = "", 0, time.monotonic() + PATIENCE_S
    waiting = list(answers)
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not piece:
                break
            said += piece.decode(errors="replace")
            if waiting and waiting[0][0] in said[seen:] and said.rstrip(" ").endswith(":"):
                seen = len(said)
                os.write(ours, waiting.pop(0)[1].encode() + b"\n")
        return child.wait(timeout=PATIENCE_S), said
    finally:
        child.kill()
        os.close(ours)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("unsloth/Qwen3-4B-GGUF", "qwen3-4b"),
        ("/a/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4-1"),
        ("a/___", "model"),
        ("a/" + "x" * 100, "x" * 63),
    ],
)
def test_names_are_those_of_deployments(source: str, name: str) -> None:
    """Out of repositories and files."""
    assert first_name(source) == name
