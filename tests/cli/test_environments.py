"""`mm env` over a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmadmin.cli.environments import app
from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.errors import InvalidInput
from mmadmin.core.recipes.python_env import derivation
from mmadmin.core.store import Store
from tests.support.engine import toolbox_for
from tests.support.wheels import locked, wheel

BIG = bytes(50_000)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two environments with one package in common: their objects' names."""
    monkeypatch.setenv("MM_HOME", str(tmp_path / "home"))
    store = Store(tmp_path / "home" / "store", floor_bytes=0)
    needs = "Requires-Dist: beta\nLicense-Expression: MIT\n"
    alpha = [
        wheel(tmp_path / v, "alpha", {"a.py": v.encode()}, version=v, metadata=needs)
        for v in ("1.0", "2.0")
    ]
    beta = wheel(tmp_path / "b", "beta", {"beta.bin": BIG})
    more = wheel(tmp_path / "c", "gamma", {"c.py": b"c"})
    names = []
    for name, wheels in (("one", [alpha[0], beta]), ("two", [alpha[1], beta, more])):
        goal = derivation(locked(*wheels, name=name), name, ["alpha", "gamma"])
        names.append(realise(goal, store, toolbox_for(store), UNOBSERVED).object)
    return names


def call(*words: str) -> Any:
    """What a command prints with `--json`."""
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_list_says_what_environments_share(made: list[str]) -> None:
    """Bytes that two have are on the disk once; what only one has is not shared."""
    found = {row["name"]: row for row in call("list")}
    assert sorted(found) == sorted(made)
    for row in found.values():
        assert len(BIG) <= row["shared_bytes"] < row["size_bytes"]
    assert [found[name]["package_count"] for name in made] == [2, 3]
    shown = CliRunner().invoke(app, ["list"], catch_exceptions=False).output
    assert all(name in shown for name in made)


def test_a_package_has_a_reason(made: list[str]) -> None:
    """Name, version, licence, size; the chain of requirements, and what needs it directly."""
    packages = {row["name"]: row for row in call("show", made[0])["packages"]}
    assert packages["alpha"]["licence"] == "MIT"
    assert packages["alpha"]["needed_by"] == [""]
    assert packages["beta"]["why"] == ["alpha", "beta"]
    assert packages["beta"]["size_bytes"] > len(BIG)
    shown = CliRunner().invoke(app, ["show", made[0]], catch_exceptions=False).output
    assert "the requirements" in shown
    assert call("why", made[0], "beta") == {
        "package": "beta",
        "why": ["alpha", "beta"],
        "needed_by": ["alpha"],
    }
    shown = CliRunner().invoke(app, ["why", made[0], "beta"], catch_exceptions=False).output
    assert "requirements → alpha → beta" in shown


def test_two_environments_differ_by_packages(made: list[str]) -> None:
    """Changed and added; nothing for what is equal."""
    assert call("diff", *made) == [
        {"name": "alpha", "before": "1.0", "after": "2.0"},
        {"name": "gamma", "before": "", "after": "1.0"},
    ]
    shown = CliRunner().invoke(app, ["diff", *made], catch_exceptions=False).output
    assert "2 packages" in shown


def test_what_is_not_there_is_refused(made: list[str]) -> None:
    """Another object, and a package that it does not have."""
    with pytest.raises(InvalidInput, match="not an environment"):
        CliRunner().invoke(app, ["show", "alpha-1.0-py3-none-any.whl"], catch_exceptions=False)
    with pytest.raises(InvalidInput, match="nothing in the environment needs"):
        CliRunner().invoke(app, ["why", made[0], "delta"], catch_exceptions=False)
