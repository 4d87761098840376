"""Client libraries in an environment of their own, made once in the test cache.

They are pinned with hashes here (`requirements.in` and `package.json`; `scripts/lock` resolves
them) and never part of the checkout's own environment. Node comes with them, from the Python index.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.engine import cache_root

HERE = Path(__file__).parent
LOCKS = ("requirements.txt", "package.json", "package-lock.json")
INSTALL_S = 900


def environment() -> Path:
    """Its folder, complete: `bin/python`, `bin/node`, `node_modules`."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in LOCKS))
    digest.update(sys.version.encode())
    folder = cache_root() / "clients" / digest.hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            (folder / "complete").touch()
    return folder


def _make(folder: Path) -> None:
    def run(*argv: str | Path) -> None:
        subprocess.run(
            argv, check=True, cwd=folder, timeout=INSTALL_S, env=_env(folder), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    run(folder / "bin/pip", "install", "--quiet", "--require-hashes", "--requirement",
        HERE / "requirements.txt")  # fmt: skip
    for name in LOCKS[1:]:
        shutil.copy(HERE / name, folder)
    run(folder / "bin/npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")


def _env(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
