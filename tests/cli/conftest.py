"""An installation of the test's own, and who runs commands on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.models import Role, User
from mmadmin.cli import installation
from mmadmin.core.home import Home


@pytest.fixture
def alice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """The first administrator of an installation that is set up."""
    monkeypatch.setenv("MM_HOME", str(tmp_path))
    installation.prepare(Home(tmp_path))
    return User.objects.create_superuser(username="alice", role=Role.ADMIN)
