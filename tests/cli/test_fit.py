"""`mm fit` and `mm hub` against a local hub and described hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmadmin.cli.build import plan
from mmadmin.cli.fit import fit, hub
from mmadmin.cli.hub_progress import hub_for, reporting
from mmadmin.core.errors import NotFound, SourceUnavailable
from tests.core.formats.gguf.tables import mistral_medium
from tests.host.test_hub_browser import header
from tests.support.hub import LocalHub, local_hub, status

SEED = Path(__file__).parents[2] / "deployments/catalog/mistral-medium-3.5-v100.toml"
REPO = "unsloth/Mistral-Medium-3.5-128B-GGUF"
app = typer.Typer()
app.command("fit")(fit)
app.command("hub")(hub)
app.command("plan")(plan)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with the deployment's repository, where the environment says the hub is."""
    with local_hub() as running:
        weights = list(mistral_medium("Q4_K_M").weights)
        hollow = header(tmp_path / "h", weights, vocabulary=64, split=(0, 1, 0))
        running.repo(REPO).commit({"m-Q4_K_M.gguf": hollow})
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nonexistent")
        monkeypatch.setenv("MM_HOME", str(tmp_path))
        yield running


def test_it_fits_four_v100s(local: LocalHub) -> None:
    """The first deployment on its own hardware: exit 0, four cards with their gigabytes."""
    done = CliRunner().invoke(app, ["fit", str(SEED), "--on", "v100x4"])
    assert done.exit_code == 0, done.output
    assert "fits on GPU 0, 1, 2, 3" in done.output
    assert "GPU 3:" in done.output
    assert "tokens a request, or 1 request of this context at once" in done.output


def test_it_does_not_fit_a_t4(local: LocalHub) -> None:
    """Exit 1, and the reason; as JSON the same."""
    done = CliRunner().invoke(app, ["fit", str(SEED), "--on", "t4"])
    assert done.exit_code == 1
    assert "want 4 GPUs" in done.output
    data = json.loads(CliRunner().invoke(app, ["fit", str(SEED), "--on", "t4", "--json"]).stdout)
    assert data["quant"] == "Q4_K_M"
    assert data["answers"][0]["ok"] is False


def test_an_unknown_host_is_refused_before_anything_is_asked(local: LocalHub) -> None:
    """Which hosts are described; the hub hears nothing."""
    with pytest.raises(NotFound, match="no host named 'v100x5'") as caught:
        CliRunner().invoke(app, ["fit", str(SEED), "--on", "v100x5"], catch_exceptions=False)
    assert "v100x4" in caught.value.remedy
    assert local.seen == []


def test_hub_lists_sets_and_licence(local: LocalHub) -> None:
    """Quants with sizes and the licence, for people and machines."""
    done = CliRunner().invoke(app, ["hub", REPO])
    assert done.exit_code == 0, done.output
    assert "Q4_K_M" in done.output
    assert "apache-2.0" in done.output
    data = json.loads(CliRunner().invoke(app, ["hub", REPO, "--json"]).stdout)
    assert data["sets"][0]["quant"] == "Q4_K_M"


@pytest.mark.parametrize(
    "words", [["hub", REPO], ["fit", str(SEED), "--on", "v100x4"], ["plan", str(SEED)]]
)
def test_a_hub_that_is_away_is_told_soon(words: list[str], local: LocalHub) -> None:
    """What is asked is said at once, and every further try; stdout has nothing."""
    local.fail("/api/", *[status(503)] * 9)
    with pytest.raises(SourceUnavailable, match="503") as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert caught.value.remedy
    assert len(local.requests("/api/")) == 2


def test_what_is_asked_is_said_on_stderr(
    local: LocalHub, capfd: pytest.CaptureFixture[str]
) -> None:
    """The question, and that it was asked again; data goes to stdout alone."""
    local.fail("/api/", status(503))
    with reporting("looking", quiet=False) as say:
        assert hub_for(say).resolve(REPO)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("looking …")
    assert "answered 503 (injected); asking again in 1 s (2 of 2)" in said.err
    with reporting("looking", quiet=True) as say:
        say("nothing")
    assert capfd.readouterr().err == ""
