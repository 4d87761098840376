"""The queue: capacity, fairness, bounds, hold; first alone, then over sockets."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.access import new_key
from mmadmin.core.snapshot import ReplicaRoute
from mmadmin.gate.queue import Place, Queue, QueueFull
from tests.gate.harness import MODEL, PATIENCE_S, PEPPER, Harness
from tests.gate.raw import RawClient, ask
from tests.gate.stub import ANSWER, Call, StubEngine, chat_answer

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": []}


def join(queue: Queue, key: str, order: list[str]) -> Place:
    """Join the queue; `order` records who was admitted."""
    place = Place(key, lambda: order.append(key))
    queue.wait(place)
    return place


def test_keys_take_turns() -> None:
    """A key with many requests delays another by one."""
    queue, order = Queue(capacity=1, limit=100), []
    assert queue.try_enter()
    for key in "aaaa":
        join(queue, key, order)
    for key in "bbc":
        join(queue, key, order)
    for _ in range(7):
        queue.leave()
    assert order == ["a", "b", "c", "a", "b", "a", "a"]


def test_the_queue_is_bounded_and_reports_positions() -> None:
    """One more than may wait is refused; those who give up make room."""
    queue = Queue(capacity=0, limit=2)
    first, second = join(queue, "a", []), join(queue, "b", [])
    assert (first.position, second.position) == (1, 2)
    with pytest.raises(QueueFull):
        join(queue, "c", [])
    queue.give_up(first)
    assert join(queue, "c", []).position == 2


def test_no_request_overtakes_the_queue() -> None:
    """A newcomer does not overtake those who wait, even when there is room for a moment."""
    queue = Queue(capacity=1, limit=5)
    queue.open = False
    join(queue, "a", [])
    queue.open = True
    assert not queue.try_enter()


@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "leave", "give up", "hold", "open"]), st.integers(0, 3)),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_the_counts_hold_whatever_happens(steps, capacity: int) -> None:
    """Never more than the capacity, never a lost place, nobody waits while there is room."""
    queue = Queue(capacity=capacity, limit=4)
    places: list[Place] = []
    straight = 0
    for step, number in steps:
        if step == "come":
            if queue.try_enter():
                straight += 1
            else:
                place = Place(str(number), lambda: None)
                try:
                    queue.wait(place)
                except QueueFull:
                    assert queue.waiting == 4
                else:
                    places.append(place)
        elif step == "leave" and straight:
            straight -= 1
            queue.leave()
        elif step == "give up" and places:
            queue.give_up(places.pop(number % len(places)))
        elif step in ("hold", "open"):
            queue.open = step == "open"
            queue.admit_waiting()
        waiting = [place for place in places if not place.admitted]
        assert queue.waiting == len(waiting)
        assert queue.running == straight + len(places) - len(waiting) <= capacity
        assert not (queue.open and queue.waiting and queue.running < capacity)


class Held:
    """An engine whose answers wait until the test lets them go; counts how many run at once."""

    def __init__(self, engine: StubEngine) -> None:
        self.now = self.most = 0
        self._allowed = asyncio.Semaphore(0)
        engine.script = self._answer

    def let_go(self, number: int) -> None:
        """So many may be answered, now or later."""
        for _ in range(number):
            self._allowed.release()

    async def _answer(self, call: Call) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await self._allowed.acquire()
        self.now -= 1
        await call.answer(ANSWER)


async def test_the_engine_gets_as_many_as_it_has_slots(harness: Harness) -> None:
    """Four slots, twelve requests: four at once, the others wait and say so."""
    held = Held(harness.engine)
    asked = [
        asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text)) for _ in range(12)
    ]
    await harness.until(lambda: (held.now, harness.gate.traffic.queues["small"].waiting) == (4, 8))
    await asyncio.sleep(0.2)
    held.let_go(12)
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    assert held.most == 4
    positions = sorted(int(a.headers.get("x-mm-queue-position", 0)) for a in answers)
    assert positions == [0] * 4 + list(range(1, 9))
    assert sum(usage.queue_ms >= 150 for usage in harness.recorded) == 8


async def test_cheap_endpoints_do_not_wait(harness: Harness) -> None:
    """Counting tokens goes on while all slots are busy."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if call.path == CHAT:
            await release.wait()
        await call.answer(ANSWER)

    harness.engine.script = script
    busy = [
        asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text)) for _ in range(5)
    ]
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 1)
    answer = await ask(harness.port, "/tokenize", {"model": MODEL}, key=harness.key.text)
    assert answer.status == 200
    release.set()
    await asyncio.gather(*busy)


async def test_a_full_queue_is_429(harness: Harness) -> None:
    """With a time to come again, in the client's shape."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    harness.engine.script = script
    harness.gate.traffic.settings = replace(harness.settings, queue_limit=1)
    harness.publish(
        routes=(replace(harness.route, replicas=(replace(harness.route.replicas[0], slots=1),)),)
    )
    waiting = [
        asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text)) for _ in range(2)
    ]
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 1)
    answer = await ask(harness.port, CHAT, BODY, key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    release.set()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}


async def test_leaving_the_queue_frees_the_place(harness: Harness) -> None:
    """A client that goes while it waits never reaches the engine."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    harness.engine.script = script
    busy = [
        asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text)) for _ in range(4)
    ]
    await harness.until(lambda: len(harness.engine.calls) == 4)
    async with RawClient(harness.port) as client:
        await client.send(CHAT, BODY, key=harness.key.text)
        await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 1)
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 0)
    release.set()
    await asyncio.gather(*busy)
    assert len(harness.engine.calls) == 4
    assert harness.recorded[0].outcome == "cancelled"
    assert harness.recorded[0].prompt_tokens == 0


async def test_a_queue_timeout_is_reported(tmp_path, engine) -> None:
    """Plainly with 503; a stream that has heard comments, inside the stream."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, queue_timeout_s=4, silence_s=0.05)
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    engine.script = script
    async with harness.open():
        busy = [
            asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text))
            for _ in range(4)
        ]
        await harness.until(lambda: len(engine.calls) == 4)
        plain, streamed = await asyncio.gather(
            ask(harness.port, CHAT, BODY, key=harness.key.text),
            ask(harness.port, CHAT, {**BODY, "stream": True}, key=harness.key.text),
        )
        assert (plain.status, plain.json["error"]["code"]) == (503, "queue_timeout")
        assert streamed.status == 200
        assert streamed.body.startswith(b": waiting\n\n: waiting\n\n")
        last = streamed.body.split(b"\n\n")[-2].removeprefix(b"data: ")
        assert json.loads(last)["error"]["code"] == "queue_timeout"
        release.set()
        await asyncio.gather(*busy)


async def test_a_hold_keeps_requests_for_the_next_generation(harness: Harness, engine) -> None:
    """Nothing is lost while the engine is swapped; answers come from the new generation."""
    harness.publish(
        routes=(replace(harness.route, mode="hold", replicas=(), hold_until=int(time.time()) + 60),)
    )
    held = [
        asyncio.create_task(
            ask(harness.port, CHAT, {**BODY, "stream": number % 2 == 0}, key=harness.key.text)
        )
        for number in range(6)
    ]
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 6)
    assert engine.calls == []
    models = await ask(harness.port, "/v1/models", key=harness.key.text, method="GET")
    assert [card["id"] for card in models.json["data"]] == [MODEL]
    harness.publish(
        routes=(
            replace(
                harness.route,
                public_name="called otherwise from now on",
                generation=4,
                generation_uid="small/4",
                replicas=(ReplicaRoute(uid="small-4-0", socket=engine.socket, slots=2),),
            ),
        )
    )
    answers = await asyncio.gather(*held)
    assert {(a.status, a.headers["x-mm-generation"]) for a in answers} == {(200, "small/4")}
    assert {usage.generation for usage in harness.recorded} == {4}


async def test_a_hold_is_for_every_endpoint(harness: Harness, engine) -> None:
    """What does not need a slot waits too: there is no engine to ask."""
    held = replace(harness.route, mode="hold", replicas=(), hold_until=int(time.time()) + 60)
    harness.publish(routes=(held,))
    request = asyncio.create_task(
        ask(harness.port, "/tokenize", {"model": MODEL}, key=harness.key.text)
    )
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 1)
    harness.publish()
    assert (await request).status == 200


async def test_a_hold_that_comes_between_is_kept(harness: Harness, engine) -> None:
    """A request that was let in when the engine had just gone waits for the next one."""
    await engine.stop()
    request = asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text))
    await harness.until(lambda: harness.gate.traffic.queues["small"].running == 1)
    held = replace(harness.route, mode="hold", hold_until=int(time.time()) + 60)
    harness.publish(routes=(held,))
    await asyncio.sleep(1.0)
    assert not request.done()
    await engine.start()
    await asyncio.sleep(0.4)
    assert engine.calls == [], "nothing goes to a held generation"
    harness.publish(routes=(replace(harness.route, generation=4, generation_uid="small/4"),))
    answer = await request
    assert (answer.status, answer.headers["x-mm-generation"]) == (200, "small/4")


async def test_a_stream_that_was_held_does_not_name_the_wrong_generation(tmp_path, engine) -> None:
    """Its head goes out with the first comment, before anybody knows who will answer."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, silence_s=0.2)
    async with harness.open():
        held = replace(harness.route, mode="hold", hold_until=int(time.time()) + 60)
        harness.publish(routes=(held,))
        async with RawClient(harness.port) as client:
            await client.send(CHAT, {**BODY, "stream": True}, key=harness.key.text)
            _, headers = await client.head()
            assert "x-mm-generation" not in headers
            assert await client.chunk() == b": waiting\n\n"
            harness.publish(
                routes=(replace(harness.route, generation=4, generation_uid="small/4"),)
            )
            while data := await client.chunk():
                last = data
        assert last.endswith(b"data: [DONE]\n\n")
        assert harness.recorded[0].generation == 4


async def test_a_hold_that_ends_without_an_engine_is_reported(harness: Harness) -> None:
    """Closed while requests wait: 503 at once."""
    harness.publish(routes=(replace(harness.route, mode="hold", hold_until=int(time.time()) + 60),))
    held = asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text))
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 1)
    harness.publish(routes=(replace(harness.route, mode="closed"),))
    answer = await asyncio.wait_for(held, PATIENCE_S)
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_unavailable")


async def test_keys_are_served_in_turn_over_the_wire(harness: Harness) -> None:
    """A single request of another key is not behind a crowd's."""
    other = new_key(PEPPER)
    harness.publish(
        keys=(harness.record, replace(harness.record, key_id=other.key_id, digest=other.digest))
    )
    held = Held(harness.engine)

    def one(name: str, key: str) -> asyncio.Task:
        body = {**BODY, "user": name}
        return asyncio.create_task(ask(harness.port, CHAT, body, key=key))

    asked = [one("crowd", harness.key.text) for _ in range(20)]
    await harness.until(lambda: (held.now, harness.gate.traffic.queues["small"].waiting) == (4, 16))
    asked.append(one("single", other.text))
    await harness.until(lambda: harness.gate.traffic.queues["small"].waiting == 17)
    held.let_go(4)
    await harness.until(lambda: len(harness.engine.calls) == 8)
    order = [call.json["user"] for call in harness.engine.calls]
    assert order.count("single") == 1, "among the next four"
    held.let_go(17)
    await asyncio.gather(*asked)


async def test_the_replica_with_room_is_chosen_and_a_dead_one_is_passed_over(
    harness: Harness, engine
) -> None:
    """Two replicas share the load; when one does not listen, the other answers for it."""
    second = type(engine)()
    await second.start()
    replicas = (
        ReplicaRoute(uid="a", socket=engine.socket, slots=2),
        ReplicaRoute(uid="b", socket=second.socket, slots=2),
    )
    harness.publish(routes=(replace(harness.route, replicas=replicas),))
    held = Held(engine)
    second.script = engine.script
    asked = [
        asyncio.create_task(ask(harness.port, CHAT, BODY, key=harness.key.text)) for _ in range(4)
    ]
    await harness.until(lambda: held.now == 4)
    assert (len(engine.calls), len(second.calls)) == (2, 2)
    held.let_go(4)
    await asyncio.gather(*asked)
    await second.stop()
    engine.script = chat_answer
    answers = [await ask(harness.port, CHAT, BODY, key=harness.key.text) for _ in range(8)]
    assert {answer.status for answer in answers} == {200}
