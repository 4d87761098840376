"""What `mm up` prints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmadmin.cli import first_run, up


@pytest.mark.parametrize("demo", [True, False])
def test_a_new_login_is_printed_once(
    demo: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Panel and login stand in the output once, with the demo and without it."""
    monkeypatch.setenv("MM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(up, "start_services", lambda *_, **__: None)
    monkeypatch.setattr(up, "ensure_admin", lambda: up.Admin("admin", "a-new-password"))
    monkeypatch.setattr(first_run, "run", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(first_run, "show", lambda *_: None)
    up.up(demo=demo)
    said = capsys.readouterr().out
    assert said.count("login ") == 1
    assert said.count("panel ") == 1
    assert said.count("a-new-password") == 1
