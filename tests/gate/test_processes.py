"""The gate as a process, with a real broker: notifications, usage records, kills, alone."""

# ruff: noqa: ASYNC110, ASYNC240 (other processes have no events to wait for)
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.access import new_key
from mmadmin.core.snapshot import GATE_WATCH_PREFIX, REVOKE_CHANNEL, Snapshot, snapshot_to_json
from mmadmin.gate.directory import KEPT, PUBLISHED
from mmadmin.gateway import listening
from tests.gate.cluster import (
    PEPPER,
    Cluster,
    Collector,
    has_ended,
    running_town,
    until_ended,
    workers_of,
)
from tests.gate.harness import MODEL, PATIENCE_S
from tests.gate.raw import RawClient, ask
from tests.gate.stub import DONE, Call, delta, paused

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": []}


@contextlib.asynccontextmanager
async def load(cluster: Cluster, *, clients: int = 4):
    """Requests one after the other on several connections; yields ids of those that finished."""
    finished: list[str] = []
    failures: list[object] = []
    stop = asyncio.Event()

    async def run() -> None:
        while not stop.is_set():
            try:
                async with RawClient(cluster.gate.port) as client:
                    while not stop.is_set():
                        streamed = len(finished) % 2 == 0
                        await client.send(CHAT, {**BODY, "stream": streamed}, key=cluster.key.text)
                        answer = await client.answer()
                        if answer.whole and answer.status == 200 and b'"error"' not in answer.body:
                            finished.append(answer.headers["x-request-id"])
                        else:
                            failures.append(answer)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(run()) for _ in range(clients)]
    try:
        yield finished, failures
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_usage_records_arrive_once_each(tmp_path, engine) -> None:
    """Spool, stream, acknowledgement; acknowledged segments are forgotten at the end."""
    async with running_town(tmp_path, engine) as cluster:
        for number in range(30):
            answer = await ask(
                cluster.gate.port, CHAT, {**BODY, "stream": number % 2 == 0}, key=cluster.key.text
            )
            assert answer.status == 200
        collector = Collector(cluster.redis)
        await collector.until(30)
        assert collector.events == 30
        assert {usage.key_id for usage in collector.recorded.values()} == {cluster.key.key_id}
        assert sorted(usage.seq for usage in collector.recorded.values()) == list(range(1, 31))
        assert await cluster.gate.stop() == 0
        await cluster.gate.start()
        collector = Collector(cluster.redis)
        async with asyncio.timeout(PATIENCE_S):
            while cluster.gate.spooled():
                await collector.collect()
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "3"])
async def test_killing_the_gate_loses_no_finished_request(tmp_path, engine, workers: str) -> None:
    """Kill -9 under load, thrice: what a client got whole is in the usage records, once."""
    async with running_town(tmp_path, engine, MM_GATE_WORKERS=workers) as cluster:
        collector = Collector(cluster.redis)
        async with load(cluster) as (finished, _):
            for _ in range(3):
                before = len(finished)
                while len(finished) < before + 40:
                    await asyncio.sleep(0.01)
                cluster.gate.kill()
                await cluster.gate.start()
                await collector.collect()
        await collector.until_all(finished)


@pytest.mark.parametrize("keeps", [True, False], ids=["with its data", "having lost everything"])
async def test_killing_the_broker_loses_nothing(tmp_path, engine, *, keeps: bool) -> None:
    """The gate answers throughout; the usage records are complete after the broker is back."""
    async with running_town(tmp_path, engine) as cluster:
        collector = Collector(cluster.redis)
        async with load(cluster) as (finished, failures):
            for round_ in range(2):
                before = len(finished)
                while len(finished) < before + 30:
                    await asyncio.sleep(0.01)
                if round_ == 0:
                    await collector.collect()
                cluster.broker.kill()
                before = len(finished)
                while len(finished) < before + 30:
                    await asyncio.sleep(0.01)
                if not keeps:
                    for path in cluster.broker.folder.glob("appendonlydir/*"):
                        path.unlink()
                await cluster.broker.start()
        assert failures == []
        await collector.until_all(finished)
        assert set(finished) == set(collector.recorded)


async def test_one_of_several_workers_dies_and_is_replaced(tmp_path, engine) -> None:
    """The others go on; the dead one's usage records are adopted."""
    async with running_town(tmp_path, engine, MM_GATE_WORKERS="2") as cluster:
        answers = [
            await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text) for _ in range(20)
        ]
        doomed, other = workers_of(cluster.gate.process.pid)
        doomed.kill()
        until_ended(doomed)
        answers += [
            await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text) for _ in range(20)
        ]
        assert {answer.status for answer in answers} == {200}
        collector = Collector(cluster.redis)
        await collector.until(40)
        async with asyncio.timeout(PATIENCE_S):
            while len({p.pid for p in workers_of(cluster.gate.process.pid)} - {doomed.pid}) < 2:
                await asyncio.sleep(0.05)
        assert other.is_running()


async def test_workers_do_not_outlive_their_parent(tmp_path, engine) -> None:
    """A parent that is killed alone leaves nobody on the port."""
    async with running_town(tmp_path, engine, MM_GATE_WORKERS="2") as cluster:
        family = workers_of(cluster.gate.process.pid)
        os.kill(cluster.gate.process.pid, signal.SIGKILL)
        cluster.gate.process.wait()
        async with asyncio.timeout(PATIENCE_S):
            while not all(has_ended(one) for one in family):
                await asyncio.sleep(0.05)
        with pytest.raises(OSError):
            await RawClient(cluster.gate.port).__aenter__()


async def test_a_killed_parents_ports_are_free_while_streams_finish(tmp_path, engine) -> None:
    """Its successor need not wait for the streams that the orphaned workers let finish."""
    go_on = asyncio.Event()
    engine.script = paused(go_on)
    async with (
        running_town(tmp_path, engine, MM_GATE_WORKERS="2") as cluster,
        RawClient(cluster.gate.port) as client,
    ):
        await client.send(CHAT, {**BODY, "stream": True}, key=cluster.key.text)
        await client.head()
        await client.chunk()
        os.kill(cluster.gate.process.pid, signal.SIGKILL)
        cluster.gate.process.wait()
        async with asyncio.timeout(PATIENCE_S):
            while not all(map(can_listen, (cluster.gate.port, cluster.gate.metrics_port))):
                await asyncio.sleep(0.02)
        go_on.set()
        assert DONE in await client.chunk()


def can_listen(port: int) -> bool:
    """True when a gate could take the port."""
    try:
        listening("127.0.0.1", port).close()
    except SystemExit:
        return False
    return True


async def test_alone_it_serves_on_and_starts_again(tmp_path, engine) -> None:
    """No broker, no panel: requests go on, a restart serves from the disk, usage records come later."""
    async with running_town(tmp_path, engine) as cluster:
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "gate" / KEPT).exists():
                await asyncio.sleep(0.02)
        cluster.broker.kill()
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 200
        assert await cluster.gate.stop() == 0
        await cluster.gate.start()
        await cluster.gate.until_answers("/readyz")
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 200
        assert len(cluster.gate.spooled()) == 2
        mode = (tmp_path / "gate" / KEPT).stat().st_mode & 0o777
        assert mode == 0o600
        await cluster.broker.start()
        await Collector(cluster.redis).until(2)


async def test_a_file_beside_it_is_enough(tmp_path, engine) -> None:
    """The panel's file reaches a gate without a broker within the timer; damage changes nothing."""
    async with running_town(tmp_path, engine) as cluster:
        cluster.broker.kill()
        other = new_key(PEPPER.encode())

        def publish(text: str) -> None:
            scratch = tmp_path / "gate" / "scratch"
            scratch.write_text(text)
            scratch.replace(tmp_path / "gate" / PUBLISHED)

        publish("{")
        await asyncio.sleep(1.2)
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 200
        snapshot = Snapshot(
            version=cluster.version + 10,
            routes={MODEL: cluster.route},
            keys={other.key_id: replace(cluster.record, key_id=other.key_id, digest=other.digest)},
        )
        publish(snapshot_to_json(snapshot))
        async with asyncio.timeout(PATIENCE_S):
            while (await ask(cluster.gate.port, CHAT, BODY, key=other.text)).status != 200:
                await asyncio.sleep(0.05)
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 401
        publish(snapshot_to_json(replace(snapshot, version=5, keys={})))
        await asyncio.sleep(1.2)
        assert (await ask(cluster.gate.port, CHAT, BODY, key=other.text)).status == 200


async def test_without_a_snapshot_it_is_alive_and_not_ready(tmp_path, engine) -> None:
    """A gate that knows nothing refuses every key and says that it is not ready."""
    async with running_town(tmp_path, engine) as cluster:
        cluster.gate.kill()
        await cluster.redis.flushall()
        (tmp_path / "gate" / KEPT).unlink(missing_ok=True)
        await cluster.gate.start()
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            url = f"http://127.0.0.1:{cluster.gate.metrics_port}"
            assert (await client.get(f"{url}/readyz")).status_code == 503
            assert (await client.get(f"{url}/nothing")).status_code == 404
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 401


async def test_a_stopping_gate_lets_streams_finish(tmp_path, engine) -> None:
    """SIGTERM: the stream goes on to its end, new connections are refused, exit code 0."""
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a"))
        await go_on.wait()
        await call.chunk(delta("b") + DONE)
        await call.end()

    engine.script = script
    async with running_town(tmp_path, engine, MM_GATE_WORKERS="2") as cluster:
        async with RawClient(cluster.gate.port) as client:
            await client.send(CHAT, {**BODY, "stream": True}, key=cluster.key.text)
            await client.head()
            await client.chunk()
            stopping = asyncio.create_task(cluster.gate.stop())
            await asyncio.sleep(0.5)
            go_on.set()
            assert await client.chunk() == delta("b") + DONE
            assert await client.chunk() == b""
        assert await stopping == 0
        await Collector(cluster.redis).until(1)
        assert await cluster.presences() == []


async def test_presence_tells_what_an_activation_needs(tmp_path, engine) -> None:
    """Version and in-flight counts, published when a snapshot comes and when a generation has drained.

    The timers are off: it is published because it happens, not because a second has passed.
    """
    go_on = asyncio.Event()

    engine.script = paused(go_on)
    async with (
        running_town(tmp_path, engine, TEST_GATE_TIMERS="off") as cluster,
        RawClient(cluster.gate.port) as client,
    ):
        await client.send(CHAT, {**BODY, "stream": True}, key=cluster.key.text)
        await client.head()
        await cluster.publish(
            routes=[replace(cluster.route, generation=4, generation_uid="small/4")]
        )
        await cluster.until_told()
        assert (await cluster.presences())[0]["inflight"] == {"small/3": 1}
        (name,) = [name async for name in cluster.redis.scan_iter(match=GATE_WATCH_PREFIX + "*")]
        (request,) = json.loads(await cluster.redis.get(name))["requests"]
        assert (request["key"], request["state"]) == (cluster.key.key_id, "answering")
        go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while (await cluster.presences())[0]["inflight"]:
                await asyncio.sleep(0.005)


async def test_a_revoked_key_is_dead_on_every_worker(tmp_path, engine) -> None:
    """Four workers, twelve streams, requests all the time: all end, none passes after.

    The timers are off, so the nudge alone does it; how soon is measured by the bench.
    """

    async def script(call: Call) -> None:
        if not call.json.get("stream"):
            await call.answer({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
            return
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a"))
        await call.gone.wait()

    engine.script = script
    env = {"MM_GATE_WORKERS": "4", "TEST_GATE_TIMERS": "off"}
    async with running_town(tmp_path, engine, **env) as cluster:
        for _ in range(3):
            doomed = new_key(PEPPER.encode())
            record = replace(cluster.record, key_id=doomed.key_id, digest=doomed.digest)
            await cluster.publish(keys=[cluster.record, record])
            await cluster.until_told()
            engine.calls.clear()

            async def use(key: str) -> int:
                passed = 0
                while (await ask(cluster.gate.port, CHAT, BODY, key=key)).status == 200:
                    passed += 1
                return passed

            async def watch(key: str) -> None:
                answer = await ask(cluster.gate.port, CHAT, {**BODY, "stream": True}, key=key)
                assert b"invalid_api_key" in answer.body

            using = [asyncio.create_task(use(doomed.text)) for _ in range(4)]
            streams = [asyncio.create_task(watch(doomed.text)) for _ in range(12)]
            while sum(bool(call.json.get("stream")) for call in engine.calls) < 12:
                await asyncio.sleep(0.02)
            while len(engine.calls) < 12 + 20:
                await asyncio.sleep(0.02)
            await cluster.publish(keys=[cluster.record, replace(record, state="revoked")])
            await asyncio.gather(*streams)
            assert sum(await asyncio.gather(*using)) > 0, "it was good before"
            await cluster.until_told()
            late = [await ask(cluster.gate.port, CHAT, BODY, key=doomed.text) for _ in range(20)]
            assert {answer.status for answer in late} == {401}


async def test_a_revoked_key_is_published_ahead_of_the_snapshot(tmp_path, engine) -> None:
    """By its id it is dead, whatever an older snapshot says that comes in between; no timer runs."""
    doomed = new_key(PEPPER.encode())
    async with running_town(tmp_path, engine, TEST_GATE_TIMERS="off") as cluster:
        record = replace(cluster.record, key_id=doomed.key_id, digest=doomed.digest)
        await cluster.publish(keys=[cluster.record, record])
        await cluster.until_told()
        assert (await ask(cluster.gate.port, CHAT, BODY, key=doomed.text)).status == 200
        assert await cluster.redis.publish(REVOKE_CHANNEL, doomed.key_id) == 1
        while (await ask(cluster.gate.port, CHAT, BODY, key=doomed.text)).status == 200:
            await asyncio.sleep(0.005)
        await cluster.publish(keys=[cluster.record, record])
        await cluster.until_told()
        assert (await ask(cluster.gate.port, CHAT, BODY, key=doomed.text)).status == 401
        assert (await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)).status == 200


async def test_figures_of_all_workers_come_from_any(tmp_path, engine) -> None:
    """One scrape has every worker's series, each family once."""
    async with (
        running_town(tmp_path, engine, MM_GATE_WORKERS="2") as cluster,
        httpx2.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        for _ in range(40):
            async with RawClient(cluster.gate.port) as raw:
                await raw.send(CHAT, BODY, key=cluster.key.text)
                assert (await raw.answer()).status == 200
        text = (await client.get(f"http://127.0.0.1:{cluster.gate.metrics_port}/metrics")).text
    requests = [line for line in text.splitlines() if line.startswith("mm_gate_requests_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in requests) == 40
    assert text.count("# TYPE mm_gate_requests_total") == 1
    assert {f'worker="{n}"' in text for n in (0, 1)} == {True}


async def test_no_secret_is_left_anywhere(tmp_path, engine) -> None:
    """A canary key, the pepper and the engine secret: not in logs, files, broker, argv, figures."""
    async with running_town(tmp_path, engine) as cluster:
        await ask(cluster.gate.port, CHAT, BODY, key=cluster.key.text)
        await ask(cluster.gate.port, CHAT, {**BODY, "model": "x"}, key=cluster.key.text)
        await ask(cluster.gate.port, CHAT, b"{", key=cluster.key.text)
        await ask(
            cluster.gate.port, CHAT, {**BODY, "model": cluster.key.text}, key=cluster.key.text
        )
        await ask(cluster.gate.port, f"/v1/models/{cluster.key.text}", key="x", method="GET")
        await ask(
            cluster.gate.port,
            CHAT,
            BODY,
            key="x",
            headers={"X-Client-Request-Id": cluster.key.text},
        )
        await Collector(cluster.redis).until(1)
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            figures = await client.get(f"http://127.0.0.1:{cluster.gate.metrics_port}/metrics")
        traces = [figures.content, repr(await cluster.redis.keys("*")).encode()]
        traces += [await cluster.redis.dump(name) for name in await cluster.redis.keys("*")]
        traces.append(Path(f"/proc/{cluster.gate.process.pid}/cmdline").read_bytes())
        await cluster.gate.stop()
        traces += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        secrets = [cluster.key.text[20:], PEPPER, "test-only-engine-master"]
        secrets.append(engine.calls[0].headers["authorization"].removeprefix("Bearer "))
        for secret in secrets:
            assert not any(secret.encode() in trace for trace in traces)
        assert b'"outcome":"ok"' in (tmp_path / "gate.log").read_bytes()


async def test_missing_secrets_stop_it_with_a_message(tmp_path, engine) -> None:
    """No pepper, an empty pepper, a bad number: exit 1 with the remedy, no traceback."""
    async with running_town(tmp_path, engine) as cluster:
        for change, words in (
            ({"MM_KEY_PEPPER": ""}, "key_pepper cannot be read"),
            ({"MM_ENGINE_MASTER": "  ", "MM_ENGINE_MASTER_FILE": "/dev/null"}, "engine_master"),
            ({"MM_GATE_WORKERS": "many"}, "MM_GATE_WORKERS is 'many'"),
            ({"MM_METRICS_PORT": str(cluster.gate.port)}, "cannot listen on"),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "mmadmin.gateway",
                env={**cluster.gate._env, **change}, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            assert process.returncode == 1
            assert words in errors.decode()
            assert "Traceback" not in errors.decode()
