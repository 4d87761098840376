"""The set-up script: says what a machine lacks, skips what is done, repeats what was interrupted."""

import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    """The script, as it lies in a checkout of its own."""
    for name in ("scripts/setup.py", "requirements/base.txt", "requirements/dev.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "setup.py", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("mm_setup", tmp_path / "scripts" / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("program", ["g++", "git"])
def test_a_missing_program_is_named_with_its_package(
    script: ModuleType, program: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Exit 1, the program, and what to install."""
    present = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else present(name))
    with pytest.raises(SystemExit) as ended:
        script.check_machine()
    assert ended.value.code == 1
    assert f"apt-get install {program}" in capsys.readouterr().err


def test_an_old_python_is_told_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys):
    """The version that it is, the version that it takes, and the package."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    with pytest.raises(SystemExit):
        script.check_machine()
    said = capsys.readouterr().err
    assert "3.11 or newer" in said
    assert "python3-venv" in said


def test_a_python_without_venv_is_told_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Debian's python3 without python3-venv."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.check_machine()
    assert "apt-get install python3-venv" in capsys.readouterr().err


def test_steps_are_done_once_and_again_when_their_input_changes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stamp skips a step; another requirements file, or no stamp, does it again."""
    done: list[list[str]] = []
    monkeypatch.setattr(script, "run", lambda argv, step, on_line=None: done.append(argv))
    Path(script.VENV).mkdir()
    script.install(script.BASE, "mm-base")
    script.install(script.BASE, "mm-base")
    assert len(done) == 1
    assert {"--require-hashes", "--no-deps"} <= set(done[0])
    base = Path(script.ROOT) / script.BASE
    base.write_text(base.read_text() + "\n")
    script.install(script.BASE, "mm-base")
    assert len(done) == 2
    script.install(script.DEV, "mm-dev")
    script.install(script.BASE, "mm-base")
    assert len(done) == 3, "dev's requirements include base's"
    base.write_text(base.read_text() + "\n")
    script.install(script.BASE, "mm-base")
    assert len(done) == 4, "but not when base has changed since"


def test_an_interrupted_step_leaves_no_stamp(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of an installation: the next run does it again."""

    def interrupted(argv, step, on_line=None):
        raise KeyboardInterrupt

    Path(script.VENV).mkdir()
    monkeypatch.setattr(script, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.install(script.BASE, "mm-base")
    assert not list(Path(script.VENV).iterdir())


def test_a_failed_program_shows_its_last_lines(script: ModuleType, capsys) -> None:
    """The output that was not shown is shown when it matters."""
    with script.Step("a step") as step, pytest.raises(SystemExit):
        script.run([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], step)
    said = capsys.readouterr()
    assert "a step failed with exit code 3" in said.err
    assert "the reason" in said.err


class LateEnd(threading.Event):
    """A step's end that does not come in the quiet moment; it tells when it is waited for again."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = threading.Event()
        self.quiet = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end itself, but for the first time."""
        if self.quiet:
            self.quiet = False
            return False
        self.reported.set()
        return super().wait()


def test_a_long_step_says_how_far_it_is(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """After the quiet moment: what, how far, how long; at the end, that it is done."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(script, "time", clock)
    step = script.Step("packages")
    step.over = over = LateEnd()
    clock.now += 2.4
    step.detail = "3 of 87: aiohttp"
    with step:
        assert over.reported.wait(60)
        clock.now += 1
    said = capsys.readouterr().out
    assert "packages  3 of 87: aiohttp  (2 s)" in said
    assert "packages: done (3.4 s)" in said


def test_help_lists_the_targets() -> None:
    """`make` alone lists what can be made."""
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("up", "down", "test", "check", "lock"):
        assert f"make {target} " in done.stdout
