"""Shell completion: commands, options and names of deployments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.models import Deployment, Host, User
from mmadmin.cli.completion import deployment_names

MM = str(Path(sys.executable).with_name("mm"))


def completed(line: str, home: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    env = {**os.environ, "MM_HOME": str(home), "_MM_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([MM], env=env, capture_output=True, text=True, check=False)
    return done.stdout.split()


def test_commands_and_options(tmp_path: Path) -> None:
    """Without an installation, too; names of deployments there are none then."""
    assert completed("mm his", tmp_path / "none") == ["history"]
    assert "--reason" in completed("mm rollback --re", tmp_path / "none")
    assert completed("mm history ", tmp_path / "none") == []


@pytest.mark.django_db
def test_names_of_deployments(alice: User) -> None:
    """Those that begin so and are not archived."""
    host = Host.objects.create(name="here")
    for name in ("mistral", "mixtral", "smol"):
        Deployment.objects.create(name=name, public_name=name, host=host)
    Deployment.objects.filter(name="mixtral").update(archived_at="2026-01-01T00:00Z")
    assert deployment_names("mi") == ["mistral"]
    assert deployment_names("") == ["mistral", "smol"]


def test_it_is_installed_for_bash(tmp_path: Path) -> None:
    """`mm --install-completion bash` writes what the shell reads at its start."""
    env = {**os.environ, "HOME": str(tmp_path), "MM_HOME": str(tmp_path / "home")}
    subprocess.run([MM, "--install-completion", "bash"], env=env, check=True, capture_output=True)
    script = (tmp_path / ".bash_completions" / "mm.sh").read_text()
    assert "_MM_COMPLETE=complete_bash" in script
    assert "mm.sh" in (tmp_path / ".bashrc").read_text()
