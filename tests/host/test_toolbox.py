"""The adapter that a recipe is given: fenced in, limited, cancellable."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import ChildLimits, Growing, UrlSource
from mmadmin.core.errors import Cancelled, InvalidInput, StepFailed, ToolMissing
from mmadmin.host.process import Limits
from mmadmin.host.toolbox import STEP_LIMITS, HostConfig
from tests.support.tools import attempt

LIMITS = ChildLimits(time_s=120, memory_bytes=1 << 30)


def test_a_program_writes_to_scratch_and_output_only(tmp_path: Path) -> None:
    """Its lines are the log; elsewhere is read-only; the level is recorded."""
    work = attempt(tmp_path / "work")
    script = f"echo one; touch {work.out}/a here; touch {tmp_path}/b || true"
    seen: list[str] = []
    work.tools.run(["/bin/sh", "-c", script], on_line=seen.append)
    assert (work.out / "a").exists()
    assert (work.tools.scratch / "here").exists()
    assert not (tmp_path / "b").exists()
    assert work.lines[0] == "one"
    assert seen == work.lines
    assert work.tools.sandbox_level == "bubblewrap"


def test_no_programs_see_secrets_or_the_callers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden folders are empty, variables such as HF_TOKEN stay outside, extra ones get in."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "key").write_text("canary")
    work = attempt(tmp_path / "work", hidden=[secrets])
    work.tools.run(["/bin/sh", "-c", f"env; cat {secrets}/key || true"], env={"EXTRA": "1"})
    assert "EXTRA=1" in work.lines
    assert "canary" not in work.log


def test_a_growing_file_is_progress(tmp_path: Path) -> None:
    """A program that says nothing is followed by the size of what it writes."""

    def let_it_go_on() -> bool:
        for done, _total, _unit in work.progress:
            (work.tools.scratch / f"seen-{done}").touch()
        return False

    work = attempt(tmp_path / "work", cancelled=let_it_go_on)
    file = work.tools.scratch / "big"
    script = (
        "for seen in 1000 2000 2500; do head -c 1000 /dev/zero >> big; "
        "while [ ! -e seen-$seen ]; do sleep 0.05; done; done"
    )
    work.tools.run(["/bin/sh", "-c", script], grows=Growing(file, 2500))
    sizes = [done for done, total, unit in work.progress if (total, unit) == (2500, "bytes")]
    assert sizes == sorted(sizes)
    assert {*sizes} - {0} == {1000, 2000, 2500}


def test_limits_of_the_host_end_a_step(tmp_path: Path) -> None:
    """A silent program is ended in words."""
    work = attempt(tmp_path / "work", limits=Limits(silence_s=0.5))
    with pytest.raises(StepFailed, match=r"sleep said nothing for 0\.5 s"):
        work.tools.run(["/bin/sleep", "600"])


def test_everything_notices_a_cancellation(tmp_path: Path) -> None:
    """Before a program, in the middle of one, before a download, at a progress report."""
    work = attempt(tmp_path / "work", cancelled=lambda: "up" in work.lines)
    with pytest.raises(Cancelled):
        work.tools.run(["/bin/sh", "-c", "echo up; exec sleep 600"])
    for act in (
        lambda: work.tools.run(["/bin/true"]),
        lambda: work.tools.find("cmake"),
        lambda: work.tools.progress(1, 2, "steps"),
        lambda: work.tools.reserve(1),
        lambda: work.tools.download(UrlSource("http://127.0.0.1:9/"), work.out / "x", "0" * 64, 1),
        lambda: work.tools.python("tests.support.echo", {}, limits=LIMITS),
    ):
        with pytest.raises(Cancelled):
            act()


def test_a_child_has_no_network_no_secrets_and_nowhere_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile model or template meets a wall on every side."""
    monkeypatch.setenv("MM_CANARY", "1")
    work = attempt(tmp_path / "work")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asked = {"port": port, "write": str(work.out / "planted")}
        answer = work.tools.python("tests.support.echo", asked, limits=LIMITS)  # type: ignore[arg-type]
    assert isinstance(answer, dict)
    assert answer["asked"] == asked
    assert answer["network"] == "none"
    assert answer["written"] == "no"
    assert "MM_CANARY" not in answer["env"]  # type: ignore[operator]
    assert not list(work.tools.scratch.iterdir())  # question and answer are gone


@pytest.mark.parametrize(("asked", "words"), [("crash", "exit code 3"), ("silent", "no answer")])
def test_a_child_that_fails_is_a_failed_step(asked: str, words: str, tmp_path: Path) -> None:
    """A bad exit and a missing answer, each in words."""
    with pytest.raises(StepFailed, match=words):
        attempt(tmp_path / "work").tools.python("tests.support.echo", asked, limits=LIMITS)


def test_digests_count_for_the_output_only(tmp_path: Path) -> None:
    """What is hashed in scratch is of no interest to the store."""
    work = attempt(tmp_path / "work")
    work.tools.hashed(work.out / "sub/model", "a" * 64)
    work.tools.hashed(work.tools.scratch / "x", "b" * 64)
    assert work.tools.known == {"sub/model": "a" * 64}


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    """Sandbox, jobs and limits; wrong ones are refused with a message."""
    env = {
        "MM_SANDBOX": "unshare",
        "MM_JOBS": "3",
        "MM_STEP_TIME_S": "60",
        "MM_STEP_SILENCE_S": "0",
        "MM_STEP_LOG_BYTES": "1000",
        "MM_STEP_MEMORY_BYTES": "2000",
    }
    config = HostConfig.from_env(tmp_path, env)
    assert (config.sandbox, config.jobs) == ("unshare", 3)
    assert config.limits == Limits(time_s=60, silence_s=0, log_bytes=1000, memory_bytes=2000)
    plain = HostConfig.from_env(tmp_path, {})
    assert (plain.sandbox, plain.limits) == ("auto", STEP_LIMITS)
    assert plain.jobs >= 1
    with pytest.raises(InvalidInput, match="MM_JOBS is 'many'"):
        HostConfig.from_env(tmp_path, {"MM_JOBS": "many"})


def test_a_level_by_name_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wanted level does not work nothing is built, rather than built with less."""
    from mmadmin.host import sandbox

    monkeypatch.setattr(sandbox, "_works", lambda level: level == "none")
    with pytest.raises(ToolMissing, match="bubblewrap does not work on this host"):
        attempt(tmp_path / "one", sandbox="bubblewrap")
    sandbox.level_here.cache_clear()
    try:
        work = attempt(tmp_path / "two", sandbox="auto")
        work.tools.run([sys.executable, "-c", "print('ran')"])
    finally:
        sandbox.level_here.cache_clear()
    assert work.tools.sandbox_level == "none"
    assert work.lines == ["ran"]
