"""The one home of settings: what `mm up` and `mm set` keep, and who reads it."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmadmin.cli import installation
from mmadmin.cli.main import app
from mmadmin.cli.services import Started, environment
from mmadmin.cli.settings_file import read_settings, settings_file, write_settings
from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Home, Ports
from mmadmin.core.variables import PYTHON_SERVICES, REMEMBERED

MM = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()"]
PORTS = Ports(panel=8000, gate=20000, metrics=20001)
TOKEN = "hf_canary_4711"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A folder that is set up, in an environment without settings."""
    for name in [*REMEMBERED, *(name.lower() for name in REMEMBERED)]:
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("MM_HOME", str(tmp_path))
    installation.prepare(Home(tmp_path))
    return Home(tmp_path)


def mm(*words: str, code: int = 0) -> str:
    """Run a command; what it printed, or the message of its refusal."""
    done = CliRunner().invoke(app, list(words))
    assert (done.exit_code != 0) == bool(code), done.output
    return str(done.exception) if code else done.stdout


def test_a_setting_of_an_earlier_version_is_left_out(home: Home) -> None:
    """Engines had ports once: the line is no problem, and is gone when settings are written."""
    settings_file(home).write_text("MM_ENGINE_PORTS_FROM=21000\nMM_JOBS=7\n")
    kept = read_settings(home)
    assert (dict(kept.values), kept.problems) == ({"MM_JOBS": "7"}, ())


@pytest.mark.parametrize(
    ("line", "named", "remedy"),
    [
        ("MM_PANEL_PROT=1", "MM_PANEL_PROT", "remove the line"),
        ("MM_HOME=/x", "MM_HOME", "remove the line"),
        ("MM_GATE_PORT", "MM_GATE_PORT", "mm set"),
        ("MM_GATE_PORT=abc", "MM_GATE_PORT", "mm unset MM_GATE_PORT"),
        ("MM_BIND='a", "MM_BIND", "quotation marks"),
        ("SSL_CERT_FILE=/nowhere.pem", "SSL_CERT_FILE", "mm set SSL_CERT_FILE"),
    ],
)
def test_a_wrong_line_is_named_and_the_others_hold(
    home: Home, line: str, named: str, remedy: str
) -> None:
    """Its number, its name and what to do; `mm up` alone is refused."""
    settings_file(home).write_text(f"# comment\n\n{line}\nMM_JOBS=7\n")
    installation.load_environment()
    assert os.environ["MM_JOBS"] == "7"
    (problem,) = read_settings(home).problems
    assert "line 3" in problem.message
    assert named in problem.message
    assert remedy in problem.remedy
    with pytest.raises(InvalidInput, match=named):
        installation.check_settings_file(home)


def test_a_wrong_line_stops_no_command_that_helps(home: Home) -> None:
    """`mm down` and `mm doctor` go on and name it; `mm up` changes nothing."""
    text = "HF_ENDPOINT=http://hub.invalid\nMM_GATE_PROT=1\n"
    settings_file(home).write_text(text)
    env = {**os.environ, "MM_HOME": str(home.root)}
    for words, code in ((["down"], 0), (["up", "--no-demo"], 1)):
        done = subprocess.run([*MM, *words], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "line 2: `MM_GATE_PROT`" in done.stderr
    assert settings_file(home).read_text() == text


def test_set_changes_after_everything_was_checked(home: Home) -> None:
    """A refused value, alone or beside another, leaves all as it was; a good one is listed."""
    mm("set", "MM_GATE_PORT=20100", "HF_ENDPOINT= http://hub:1/ ")
    before = settings_file(home).read_text()
    for words in (
        ["MM_JOBS=3", "MM_GATE_PORT=abc"],
        ["MM_PANEL_PORT=20100"],
        ["MM_METRICS_PORT=8000"],
        ["HF_ENDPOINT=hub"],
        ["ALL_PROXY=socks://127.0.0.1:1"],
        ["MM_BIND=a'b\"c"],
        ["MM_LOG_LEVEL=loud"],
        ["MM_PANEL_PROT=1"],
        ["MM_HOME=/x"],
        ["MM_JOBS="],
    ):
        assert words[-1].partition("=")[0][:8] in mm("set", *words, code=1)
    assert settings_file(home).read_text() == before
    installation.load_environment()
    listed = {row["name"]: row for row in json.loads(mm("set", "--json"))}
    assert (listed["MM_GATE_PORT"]["value"], listed["MM_GATE_PORT"]["source"]) == (
        "20100",
        "settings",
    )
    assert listed["HF_ENDPOINT"]["value"] == "http://hub:1/"
    assert listed["MM_JOBS"]["source"] == "default"


def test_unset_takes_one_away(home: Home) -> None:
    """And no other one; a wrong line of another name stays for its owner to mend."""
    write_settings(home, {"MM_GATE_PORT": "20100", "HF_ENDPOINT": "http://hub"})
    with settings_file(home).open("a") as file:
        file.write("MM_PANEL_PROT=1\n")
    assert json.loads(mm("unset", "HF_ENDPOINT", "--json")) == {
        "changed": ["HF_ENDPOINT"],
        "restarts": ["worker"],
    }
    assert dict(read_settings(home).values) == {"MM_GATE_PORT": "20100"}
    assert [problem.name for problem in read_settings(home).problems] == ["MM_PANEL_PROT"]


def test_a_secret_has_a_file_of_its_own_and_is_never_printed(home: Home) -> None:
    """Neither in the list nor when it is set, and no service's program holds it."""
    said = mm("set", f"HF_TOKEN= {TOKEN}\n") + mm("set", "REDIS_URL=redis://u:geheim@h/0")
    path = home.secrets / "hf_token"
    assert path.read_text() == f"{TOKEN}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    installation.load_environment()
    assert os.environ["HF_TOKEN"] == TOKEN
    said += mm("set") + mm("set", "--json") + settings_file(home).read_text().replace("geheim", "")
    assert TOKEN not in said
    assert "geheim" not in said
    assert all(
        TOKEN not in environment(home, PORTS, name).values()
        for name in (*PYTHON_SERVICES, "broker")
    )
    mm("unset", "HF_TOKEN")
    assert not path.exists()


def test_services_find_secrets_themselves(home: Home) -> None:
    """The worker's settings take them from their files; the environment goes before."""
    mm("set", f"HF_TOKEN={TOKEN}")
    script = "import mmadmin.settings, os; print(os.environ['HF_TOKEN'])"
    for more, wanted in (({}, TOKEN), ({"HF_TOKEN": "other"}, "other")):
        env = {k: v for k, v in os.environ.items() if k != "HF_TOKEN"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**env, "MM_HOME": str(home.root), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == wanted


def test_each_service_is_told_what_it_reads(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the hub restarts the worker, and neither the gate nor the broker."""
    names = ("HF_ENDPOINT", "HTTPS_PROXY", "SSL_CERT_FILE", "MM_GATE_QUEUE_LIMIT")
    for name in names:
        monkeypatch.setenv(name, "17")
    told = {
        service: {name for name in names if name in environment(home, PORTS, service)}
        for service in ("broker", "worker", "panel", "gate")
    }
    assert told["broker"] == set()
    assert told["gate"] == {"MM_GATE_QUEUE_LIMIT"}
    assert {"HF_ENDPOINT", "HTTPS_PROXY", "SSL_CERT_FILE"} <= told["worker"]
    assert "HF_ENDPOINT" not in told["panel"]


def test_a_changed_secret_restarts_who_reads_it(home: Home) -> None:
    """It stands in no program, so that its file tells."""
    before = Started.now(home)
    assert before.to_restart(before) == set()
    mm("set", f"HF_TOKEN={TOKEN}")
    after = Started.now(home)
    assert after.to_restart(before) == {"worker"}
    mm("set", f"HF_TOKEN={TOKEN}", "MM_JOBS=2")
    assert Started.now(home) == after, "the same token changes nothing"
    stamp = home.run_dir / "stamp"
    after.write(stamp)
    assert Started.read(stamp) == after
    stamp.write_text("what an earlier version wrote")
    assert Started.now(home).to_restart(Started.read(stamp)) == set(PYTHON_SERVICES)


def test_up_keeps_what_libraries_read(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub and proxies too, a proxy by either case of its name."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub")
    monkeypatch.setenv("https_proxy", "http://u:p@proxy:3128")
    installation.load_environment()
    installation.remember(home)
    assert dict(read_settings(home).values) == {
        "HF_ENDPOINT": "http://hub",
        "HTTPS_PROXY": "http://u:p@proxy:3128",
    }
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1")
    installation.load_environment()
    with pytest.raises(InvalidInput, match="ALL_PROXY"):
        installation.remember(home)
