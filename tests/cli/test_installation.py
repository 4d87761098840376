"""One installation's folder, secrets, remembered settings and ports."""

import os
import socket
import stat
from pathlib import Path

import pytest

from mmadmin.cli import installation
from mmadmin.cli.settings_file import check_distinct
from mmadmin.core.errors import Conflict, InvalidInput
from mmadmin.core.home import Home, Ports
from mmadmin.core.variables import REMEMBERED
from tests.support.ports import free_ports


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any of our settings."""
    for name in [*REMEMBERED, *(name.lower() for name in REMEMBERED), "MM_HOME"]:
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    return monkeypatch


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_prepare_makes_private_secrets_once(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> None:
    """Secrets are 0600 in a 0700 folder, differ, and survive a second run."""
    home = Home(tmp_path / "home")
    installation.prepare(home)
    first = {name: (home.secrets / name).read_text() for name in installation.SECRETS}
    assert len(set(first.values())) == len(installation.SECRETS)
    assert all(len(text) > 60 for text in first.values())
    assert mode(home.secrets) == 0o700
    assert mode(home.run_dir) == 0o700
    assert {mode(home.secrets / name) for name in installation.SECRETS} == {0o600}
    installation.prepare(home)
    assert {name: (home.secrets / name).read_text() for name in installation.SECRETS} == first


def test_prepare_mends_loose_modes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> None:
    """A secret that somebody made readable is private again after the next start."""
    home = Home(tmp_path / "home")
    installation.prepare(home)
    (home.secrets / "key_pepper").chmod(0o644)
    home.secrets.chmod(0o755)
    home.database.chmod(0o644)
    installation.prepare(home)
    assert mode(home.database) == 0o600
    assert mode(home.secrets / "key_pepper") == 0o600
    assert mode(home.secrets) == 0o700


def test_ports_are_remembered_and_the_environment_goes_first(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """What `mm up` was told is found by the next command; a variable still wins."""
    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv("MM_PANEL_PORT", "8123")
    clean_env.setenv("PUBLIC_ORIGIN", "https://mm.example.org")
    installation.prepare(Home(tmp_path))
    installation.remember(Home(tmp_path))
    clean_env.delenv("MM_PANEL_PORT")
    clean_env.delenv("PUBLIC_ORIGIN")
    installation.load_environment()
    assert os.environ["MM_PANEL_PORT"] == "8123"
    assert os.environ["PUBLIC_ORIGIN"] == "https://mm.example.org"
    clean_env.setenv("MM_PANEL_PORT", "9000")
    installation.load_environment()
    assert os.environ["MM_PANEL_PORT"] == "9000"
    assert mode(installation.settings_file(Home(tmp_path))) == 0o600


def test_a_variable_that_is_set_to_nothing_is_not_set(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """`MM_PANEL_PORT= mm …` means the remembered port, not the default one; a file counts too."""
    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv("MM_PANEL_PORT", "8123")
    installation.prepare(Home(tmp_path))
    installation.remember(Home(tmp_path))
    for name in ("MM_PANEL_PORT", "MM_HOST_NAME", "MM_LOG_LEVEL", "MM_GATE_ORIGIN"):
        clean_env.setenv(name, "")
    (tmp_path / "origin").write_text("https://api.example.org\n")
    clean_env.setenv("MM_GATE_ORIGIN_FILE", str(tmp_path / "origin"))
    installation.load_environment()
    assert Ports.from_env().panel == 8123
    assert {"MM_HOST_NAME", "MM_LOG_LEVEL"}.isdisjoint(os.environ)
    assert os.environ["MM_GATE_ORIGIN"] == "https://api.example.org"


def test_without_mm_home_the_state_is_in_the_checkout(clean_env: pytest.MonkeyPatch) -> None:
    """`mm` finds its state wherever it is typed."""
    clean_env.chdir("/")
    installation.load_environment()
    home = Home.from_env()
    assert home.root == installation.CHECKOUT / "var"


def test_a_taken_port_names_the_process(clean_env: pytest.MonkeyPatch) -> None:
    """The error says who holds the port and which variable moves ours."""
    port, second, following = free_ports(3)
    with socket.socket() as holder, socket.socket() as another:
        for held, number in ((holder, port), (another, second)):
            held.bind(("127.0.0.1", number))
            held.listen(1)
        with pytest.raises(Conflict) as caught:
            installation.check_port(port, "MM_PANEL_PORT", "panel")
    assert f"port {port} (panel) is taken by" in caught.value.message
    assert f"pid {os.getpid()}" in caught.value.message
    assert f"MM_PANEL_PORT={following} make up" in caught.value.remedy, "one that is free"
    installation.check_port(port, "MM_PANEL_PORT", "panel")


@pytest.mark.parametrize("value", ["abc", "-1", "0", "8091.5", "99999", " ", "80,81", "9" * 5000])
def test_a_port_that_is_none_is_refused_before_it_is_remembered(
    tmp_path: Path, clean_env: pytest.MonkeyPatch, value: str
) -> None:
    """Remembered, it would make every later command fail."""
    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv("MM_PANEL_PORT", value)
    with pytest.raises(InvalidInput, match="MM_PANEL_PORT"):
        installation.load_environment()


def test_one_port_is_not_for_two() -> None:
    """Said before anything is started."""
    with pytest.raises(InvalidInput, match="a port each"):
        check_distinct(Ports(panel=8000, gate=8000, metrics=8001))


def test_a_home_that_cannot_be_is_refused_in_words(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """A file in its place, or above it."""
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput, match="cannot hold an installation"):
            installation.prepare(Home(root))


def test_an_address_of_another_machine_is_refused_in_words(clean_env: pytest.MonkeyPatch) -> None:
    """Nobody has taken the port; the address is wrong."""
    for address in ("192.0.2.1", "999.1.1.1"):
        clean_env.setenv("MM_BIND", address)
        with pytest.raises(InvalidInput, match="not an address"):
            installation.check_port(1, "MM_PANEL_PORT", "panel")


@pytest.mark.parametrize("command", [["up", "--no-demo"], ["run", "gate"]])
def test_a_refused_command_remembers_nothing(
    tmp_path: Path, clean_env: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Neither `mm up` that was refused, nor `mm run`, changes what the next command finds."""
    from mmadmin.cli import containers, up

    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv("MM_GATE_PORT", "20100")
    installation.prepare(Home(tmp_path))
    installation.remember(Home(tmp_path))
    before = installation.settings_file(Home(tmp_path)).read_text()
    assert "20100" in before
    clean_env.setenv("MM_GATE_PORT", "8000")  # the panel's
    if command[0] == "up":
        with pytest.raises(InvalidInput, match="panel"):
            up.up(demo=False)
    else:
        clean_env.setattr("os.execvpe", lambda *_: None)
        clean_env.chdir(tmp_path)
        containers.run("gate")
    assert installation.settings_file(Home(tmp_path)).read_text() == before


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("PUBLIC_ORIGIN", "https://MM.example.org/", "https://mm.example.org"),
        ("MM_GATE_ORIGIN", " http://api.example.org:8080", "http://api.example.org:8080"),
        ("MM_LOG_LEVEL", "info", "INFO"),
    ],
)
def test_values_are_brought_into_their_form(
    tmp_path: Path, clean_env: pytest.MonkeyPatch, name: str, value: str, kept: str
) -> None:
    """As browsers send an origin, and as logging knows a level."""
    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv(name, value)
    installation.load_environment()
    assert os.environ[name] == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PUBLIC_ORIGIN", "mm.example.org"),
        ("PUBLIC_ORIGIN", "notaurl"),
        ("PUBLIC_ORIGIN", "ftp://mm.example.org"),
        ("PUBLIC_ORIGIN", "https://mm.example.org/panel"),
        ("PUBLIC_ORIGIN", "https://mm.example.org:443"),
        ("PUBLIC_ORIGIN", "https://user@mm.example.org"),
        ("MM_GATE_ORIGIN", "https://:1"),
        ("MM_GATE_ORIGIN", "https://[::1"),
        ("MM_LOG_LEVEL", "trace"),
    ],
)
def test_wrong_values_are_refused_by_name(
    tmp_path: Path, clean_env: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Before a service fails on them, and before they are remembered."""
    clean_env.setenv("MM_HOME", str(tmp_path))
    clean_env.setenv(name, value)
    with pytest.raises(InvalidInput, match=name):
        installation.load_environment()


def test_clients_are_told_the_gates_origin(clean_env: pytest.MonkeyPatch) -> None:
    """What is printed for clients is where clients find the gate; our own questions go directly."""
    ports = Ports(panel=8000, gate=20000, metrics=20001)
    assert installation.public_gate_url(ports) == "http://127.0.0.1:20000"
    clean_env.setenv("MM_GATE_ORIGIN", "https://api.example.org")
    assert installation.public_gate_url(ports) == "https://api.example.org"
    assert installation.gate_url(ports) == "http://127.0.0.1:20000"
