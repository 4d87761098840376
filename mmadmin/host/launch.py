"""Start an engine from its launch file: `python -m mmadmin.host.launch <replica.json>`.

The supervisor runs this; it becomes the engine by `exec`, so that pid and process group stay. The
secret lies in the launch file (0600) and goes to the engine by its environment, never by argv.
The environment is made from scratch: what an operator's shell exports does not reach an engine.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, NoReturn

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
    if "socket" not in launch:
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
    sys.stderr.write(f"mmadmin: starting {' '.join(command)}\n")
    sys.stderr.flush()
    try:
        os.execve(command[0], command, env)  # noqa: S606 (becoming the engine is the point)
    except OSError as error:
        refuse(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
