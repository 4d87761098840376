"""`mm fit` and `mm browse` against a local hub and described hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmadmin.cli.fit import browse, fit
from tests.core.gguf_tables import mistral_medium
from tests.host.test_hub_browser import header
from tests.support.hub import LocalHub, local_hub

SEED = Path(__file__).parents[2] / "deployments/catalog/mistral-medium-3.5-v100.toml"
REPO = "unsloth/Mistral-Medium-3.5-128B-GGUF"
app = typer.Typer()
app.command("fit")(fit)
app.command("browse")(browse)


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
    assert "tokens a request" in done.output


def test_it_does_not_fit_a_t4(local: LocalHub) -> None:
    """Exit 1, and the reason; as JSON the same."""
    done = CliRunner().invoke(app, ["fit", str(SEED), "--on", "t4"])
    assert done.exit_code == 1
    assert "tensor split wants 4" in done.output
    data = json.loads(CliRunner().invoke(app, ["fit", str(SEED), "--on", "t4", "--json"]).stdout)
    assert data["quant"] == "Q4_K_M"
    assert data["answers"][0]["ok"] is False


def test_browse_lists_sets_and_licence(local: LocalHub) -> None:
    """Quants with sizes and the licence, for people and machines."""
    done = CliRunner().invoke(app, ["browse", REPO])
    assert done.exit_code == 0, done.output
    assert "Q4_K_M" in done.output
    assert "apache-2.0" in done.output
    data = json.loads(CliRunner().invoke(app, ["browse", REPO, "--json"]).stdout)
    assert data["sets"][0]["quant"] == "Q4_K_M"
