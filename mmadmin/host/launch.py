"""Start an engine from its launch file: `python -m mmadmin.host.launch <replica.json>`.

The supervisor runs this. It starts the engine in its sandbox and stays: it passes SIGTERM on to the
engine, and ends as the engine ends, with its exit code or by its signal; when it is killed, the
kernel kills the engine. Without a sandbox it becomes the engine by `exec`. The secret lies in the
launch file (0600) and goes to the engine by its environment, never by argv.
The environment is made from scratch: what an operator's shell exports does not reach an engine.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mmadmin.core.errors import ToolMissing
from mmadmin.host.engine_sandbox import EngineSandbox, engine_of, limit_resources

KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "SUPERVISOR_ENABLED",
    "SUPERVISOR_PROCESS_NAME",
    "SUPERVISOR_SERVER_URL",
)
"""What an engine gets of the supervisor's own environment."""
EXIT_BAD_FILE = 78
"""sysexits' EX_CONFIG: the launch file cannot be used; starting again would not help."""
SIGNALLED = 128


def refuse(message: str) -> NoReturn:
    """Say why into the log and end."""
    sys.stderr.write(f"mmadmin: {message}\n")
    raise SystemExit(EXIT_BAD_FILE)


def read(path: Path) -> dict[str, Any]:
    """The launch file, refused when others may read it or its secret is empty."""
    try:
        mode = path.stat().st_mode
        launch: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"the launch file cannot be read: {error}")
    if stat.S_IMODE(mode) & 0o077:
        refuse(f"others may read the launch file {path}; it must have mode 0600")
    if "sandbox" not in launch:
        refuse(f"the launch file {path} is of an earlier version; the engine is restarted")
    # An engine without a key has its authentication switched off.
    if not str(launch.get("secret", "")).strip():
        refuse(f"the launch file {path} has no secret")
    return launch


def main(argv: list[str]) -> NoReturn:
    """Become the engine."""
    if len(argv) != 1:
        refuse("usage: python -m mmadmin.host.launch FILE")
    launch = read(Path(argv[0]))
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= launch["env"]
    env[launch["secret_env"]] = launch["secret"]
    command = [str(word) for word in launch["argv"]]
    # What a killed engine has left: no server listens on a path that exists.
    Path(launch["socket"]).unlink(missing_ok=True)
    if not os.access(command[0], os.X_OK):
        refuse(f"{command[0]} cannot be started: it is not an executable file")
    sandbox = EngineSandbox.from_json(launch["sandbox"])
    limit_resources(on_gpus=bool(sandbox.devices))
    sys.stderr.write(f"mmadmin: starting in sandbox {sandbox.level}: {' '.join(command)}\n")
    sys.stderr.flush()
    try:
        if sandbox.level == "none":
            os.execve(command[0], command, env)  # noqa: S606 (becoming the engine is the point)
        hold(sandbox, command, env)
    except (OSError, ToolMissing) as error:
        refuse(f"{command[0]} cannot be started: {error}")


def hold(sandbox: EngineSandbox, command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Start the engine in its sandbox, wait for its end, and end likewise."""
    with sandbox.enclosing(command, env) as (argv, its_env, given):
        child = subprocess.Popen(argv, env=its_env, pass_fds=given)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        engine = engine_of(os.getpid())
        with suppress(ProcessLookupError):  # it is ending by itself
            os.kill(child.pid if engine is None else engine, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, hand_on)
    end_as(child.wait())


def end_as(code: int) -> NoReturn:
    """End as a program did: a sandbox tells its signal as 128 and more."""
    number = -code if code < 0 else code - SIGNALLED
    if number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
