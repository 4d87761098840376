"""The spool and its courier: nothing is left out, whatever breaks in between."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio

from mmadmin.core.snapshot import Usage, usage_from_json
from mmadmin.gate import spool as module
from mmadmin.gate.spool import Courier, Spool, segments
from tests.gate.cluster import Collector


@pytest_asyncio.fixture
async def client(broker) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to an empty broker."""
    connection = broker.client()
    await connection.flushall()
    yield connection
    await connection.aclose()


def usage(number: int) -> Usage:
    """One finished request."""
    return Usage(
        id=f"r{number}", at=1.0, key_id="k", deployment="d", generation=1, endpoint="chat",
        status=200, outcome="ok",
    )  # fmt: skip


def fill(spool: Spool, count: int, *, from_: int = 0) -> None:
    """Record so many."""
    for number in range(from_, from_ + count):
        spool.record(usage(number))


async def settle(courier: Courier, collector: Collector, rounds: int = 12) -> None:
    """Carry and collect by turns."""
    for _ in range(rounds):
        await courier.step()
        await collector.collect()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """No waiting between looks."""
    monkeypatch.setattr(module, "ADOPT_EVERY_S", 0.0)
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)


@pytest.fixture
def small_segments(monkeypatch) -> None:
    """A new segment at nearly every look."""
    monkeypatch.setattr(module, "SEGMENT_LIMIT_BYTES", 100)


async def test_a_line_is_on_disk_at_once_and_as_the_codec_reads_it(tmp_path) -> None:
    """Place and number are written into it."""
    spool = Spool(tmp_path)
    fill(spool, 2)
    (path,) = segments(spool.folder)
    read = [usage_from_json(line) for line in path.read_bytes().splitlines()]
    assert [(u.id, u.gate, u.seq) for u in read] == [("r0", spool.id, 1), ("r1", spool.id, 2)]
    spool.close()


@pytest.mark.usefixtures("small_segments")
async def test_thousands_of_a_dead_worker_are_delivered_whole(tmp_path, client) -> None:
    """More than a batch, over several segments; the folder goes when all is acknowledged."""
    dead = Spool(tmp_path)
    for part in range(4):
        fill(dead, 500, from_=500 * part)
        dead.rotate()
    dead.close()
    living = Spool(tmp_path)
    courier, collector = Courier(client, tmp_path, living), Collector(client)
    fill(living, 700, from_=5000)
    await settle(courier, collector, rounds=30)
    assert len(collector.recorded) == collector.events == 2700
    assert not dead.folder.exists()
    assert courier.undelivered == 0
    living.close()


@pytest.mark.usefixtures("small_segments")
async def test_what_the_stream_lost_is_sent_again(tmp_path, client) -> None:
    """The broker forgets everything after some was acknowledged: the rest arrives, none twice."""
    spool = Spool(tmp_path)
    courier, collector = Courier(client, tmp_path, spool), Collector(client)
    for part in range(3):
        fill(spool, 400, from_=400 * part)
        await courier.step()
    await collector.collect()
    await courier.step()
    fill(spool, 900, from_=1200)
    for _ in range(4):
        await courier.step()
    await client.flushall()
    await settle(courier, collector, rounds=20)
    assert len(collector.recorded) == 2100
    assert courier.undelivered == 0
    assert len(segments(spool.folder)) == 1
    spool.close()


async def test_the_folder_of_a_running_worker_is_left_alone(tmp_path, client) -> None:
    """Two workers, two folders: each carries its own."""
    one, two = Spool(tmp_path), Spool(tmp_path)
    fill(one, 3)
    fill(two, 4, from_=10)
    couriers = [Courier(client, tmp_path, spool) for spool in (one, two)]
    collector = Collector(client)
    for _ in range(3):
        for courier in couriers:
            await courier.step()
        await collector.collect()
    assert collector.events == len(collector.recorded) == 7
    one.close()
    two.close()


async def test_a_damaged_line_does_not_block_delivery(tmp_path, client) -> None:
    """The usage records show that something was there, and what follows arrives."""
    dead = Spool(tmp_path)
    fill(dead, 3)
    dead.close()
    (path,) = segments(dead.folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00garbage\n" + lines[2] + b'{"id":"torn')
    living = Spool(tmp_path)
    courier, collector = Courier(client, tmp_path, living), Collector(client)
    await settle(courier, collector)
    assert sorted(collector.recorded) == [f"damaged-{dead.id}-2", "r0", "r2"]
    assert not dead.folder.exists()
    living.close()


async def test_a_full_disk_loses_nothing_that_fits_later(tmp_path, client, monkeypatch) -> None:
    """Lines wait in memory while the disk refuses, and keep their order."""
    spool = Spool(tmp_path)
    real_write, full = module.os.write, True

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    fill(spool, 1)
    monkeypatch.setattr(module.os, "write", write)
    fill(spool, 3, from_=1)
    assert spool.errors == 3
    full = False
    fill(spool, 1, from_=4)
    courier, collector = Courier(client, tmp_path, spool), Collector(client)
    await settle(courier, collector)
    assert sorted(collector.recorded) == ["r0", "r1", "r2", "r3", "r4"]
    assert courier.undelivered == 0
    spool.close()
