"""The container form agrees with the code: commands, variables, files, secrets, health."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from django.contrib.auth.hashers import PBKDF2PasswordHasher

from mmadmin.cli.main import app
from mmadmin.cli.services import services
from mmadmin.core.home import Home, Ports
from mmadmin.core.variables import VARIABLES
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OURS = {"init", "panel", "gate", "worker", "beat"}


def test_every_program_has_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an outside broker, the services of `mm up` and the containers are the same."""
    monkeypatch.setenv("REDIS_URL", "redis://broker:6379/0")
    programs = {s.spec.name for s in services(Home(tmp_path), Ports.from_env({}))}
    assert set(COMPOSE["services"]) == programs | {"init", "database", "broker"}
    for name in programs:
        assert COMPOSE["services"][name]["command"] == ["run", name]


@pytest.mark.parametrize("name", sorted(OURS))
def test_commands_are_commands_of_mm(name: str) -> None:
    """What a container runs, and what its health check runs, `mm` has."""
    root: Any = typer.main.get_command(app)
    service = COMPOSE["services"][name]
    words = [service["command"]]
    if test := service.get("healthcheck", {}).get("test"):
        assert test[:2] == ["CMD", "mm"]
        words.append(test[2:])
        assert test[3] == name
    for command, *rest in words:
        known = {option for p in root.commands[command].params for option in p.opts}
        assert all(word in known for word in rest if word.startswith("--"))


@pytest.mark.parametrize("name", sorted(OURS))
def test_variables_and_secrets_exist(name: str) -> None:
    """Every variable is documented, and every secret that one points to is mounted and declared."""
    service = COMPOSE["services"][name]
    for variable, value in service["environment"].items():
        assert variable.removesuffix("_FILE") in VARIABLES
        if variable.endswith("_FILE"):
            assert Path(value).name in service["secrets"]
    assert set(service["secrets"]) <= set(COMPOSE["secrets"])
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_panel_is_told_everything_about_single_sign_on() -> None:
    """Each of its variables reaches the panel's container, and no other one."""
    wanted = {name for name in VARIABLES if name.startswith("MM_OIDC_")}
    for name in OURS:
        environment = COMPOSE["services"][name]["environment"]
        told = {variable.removesuffix("_FILE") for variable in environment if "OIDC" in variable}
        assert told == (wanted if name == "panel" else set())


def test_no_secret_is_written_out() -> None:
    """Passwords come by file only."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert not re.search(r"(?i)password:[ \t]*[^\s{]|postgres://", text)


def test_state_is_kept_and_programs_are_watched() -> None:
    """Named volumes hold all state; what can answer has a health check; the GPUs go to the worker."""
    mounted = {v.split(":")[0] for s in COMPOSE["services"].values() for v in s.get("volumes", [])}
    assert mounted == set(COMPOSE["volumes"])
    for name in ("database", "broker", "panel", "gate", "worker"):
        assert "test" in COMPOSE["services"][name]["healthcheck"], name
    devices = COMPOSE["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
    assert COMPOSE["services"]["gate"]["network_mode"] == "service:worker"


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    """Every COPY has its source in the repository, let through by .dockerignore; targets exist."""
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in allowed, source
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    assert targets == {COMPOSE["services"][name]["build"]["target"] for name in OURS}
    homes = set(re.findall(r"MM_HOME=(\S+)", DOCKERFILE))
    assert homes == {v.split(":")[1] for v in COMPOSE["services"]["panel"]["volumes"]}


def test_init_prepares_and_starts_nothing(tmp_path: Path) -> None:
    """`mm init` twice: the administrator has the given password, all secrets come from files."""
    (tmp_path / "password").write_text("a-long-password\n")
    (tmp_path / "database").write_text(f"sqlite:///{tmp_path}/other.sqlite3\n")
    (tmp_path / "pepper").write_text("pepper-of-another-place\n")
    env = {
        "PATH": os.environ["PATH"],
        "MM_HOME": str(tmp_path / "home"),
        "MM_PANEL_PORT": str(free_port()),
        "DATABASE_URL_FILE": str(tmp_path / "database"),
        "MM_KEY_PEPPER_FILE": str(tmp_path / "pepper"),
    }

    def mm(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()", *words]
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    (tmp_path / "weak").write_text("admin\n")
    weak = mm("init", "--admin-password-file", str(tmp_path / "weak"))
    assert weak.returncode == 1
    assert "12 characters" in weak.stderr
    for _ in range(2):
        done = mm("init", "--admin-password-file", str(tmp_path / "password"), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"admin": "admin", "password": None}
    with sqlite3.connect(tmp_path / "other.sqlite3") as database:
        rows = database.execute("select username, role, password from deployments_user").fetchall()
    assert [(name, role) for name, role, _ in rows] == [("admin", "admin")]
    assert PBKDF2PasswordHasher().verify("a-long-password", rows[0][2])
    unwell = mm("healthy", "panel")
    assert unwell.returncode == 1
    assert "panel does not answer" in unwell.stderr
    env["DATABASE_URL_FILE"] = str(tmp_path / "none")
    assert "DATABASE_URL_FILE" in mm("status").stderr
