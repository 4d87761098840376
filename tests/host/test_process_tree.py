"""What a process holds together with its descendants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mmadmin.host import process_tree

MIB = 1 << 20
WORKER = """
import socket, sys
held = bytearray(64 << 20)
held[::4096] = b"x" * len(held[::4096])
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("up", flush=True)
sys.stdin.read()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the worker listens."""
    return str(tmp_path / "engine.sock")


@pytest.fixture
def engine(path: str) -> Iterator[tuple[int, int]]:
    """An engine that leaves memory and socket to a worker: the pids of both."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, WORKER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())


def test_the_members_of_a_tree_begin_with_its_root(engine: tuple[int, int]) -> None:
    """Both processes, and nothing of a pid that has ended."""
    assert [one.pid for one in process_tree.members(engine[0])] == list(engine)
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    assert process_tree.members(ended.pid) == []


def test_main_memory_of_workers_counts_for_the_engine(engine: tuple[int, int]) -> None:
    """The worker holds 64 MiB and the engine next to nothing."""
    alone = psutil.Process(engine[0]).memory_info().rss
    assert process_tree.own_memory_bytes(engine[0]) > 64 * MIB
    assert process_tree.resident_bytes(engine[0]) > 64 * MIB + alone // 4
    assert alone < 64 * MIB


def test_a_socket_of_a_worker_is_the_engines(
    engine: tuple[int, int], path: str, tmp_path: Path
) -> None:
    """It listens by its worker; an unrelated process does not."""
    assert process_tree.listener(path) == engine[1]
    assert process_tree.listens(engine[0], path)
    assert process_tree.listens(engine[1], path)
    assert process_tree.listener(str(tmp_path / "none.sock")) is None
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        assert not process_tree.listens(other.pid, path)
        other.kill()
