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
from tests.gate.house import MODEL, PATIENCE_S, PEPPER, House
from tests.gate.raw import RawClient, ask
from tests.gate.stub import ANSWER, Call, StubEngine, chat_answer

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": []}


def join(queue: Queue, key: str, order: list[str]) -> Place:
    """Join the line; the order of admission is written down."""
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


def test_the_line_is_bounded_and_positions_are_told() -> None:
    """One more than may wait is refused; those who give up make room."""
    queue = Queue(capacity=0, limit=2)
    first, second = join(queue, "a", []), join(queue, "b", [])
    assert (first.position, second.position) == (1, 2)
    with pytest.raises(QueueFull):
        join(queue, "c", [])
    queue.give_up(first)
    assert join(queue, "c", []).position == 2


def test_nobody_passes_the_line() -> None:
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


async def test_the_engine_gets_as_many_as_it_has_slots(house: House) -> None:
    """Four slots, twelve requests: four at once, the others wait and say so."""
    held = Held(house.engine)
    asked = [
        asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(12)
    ]
    await house.until(lambda: (held.now, house.gate.traffic.queues["small"].waiting) == (4, 8))
    await asyncio.sleep(0.2)
    held.let_go(12)
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    assert held.most == 4
    positions = sorted(int(a.headers.get("x-mm-queue-position", 0)) for a in answers)
    assert positions == [0] * 4 + list(range(1, 9))
    assert sum(usage.queue_ms >= 150 for usage in house.recorded) == 8


async def test_cheap_endpoints_do_not_wait(house: House) -> None:
    """Counting tokens goes on while all slots are busy."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if call.path == CHAT:
            await release.wait()
        await call.answer(ANSWER)

    house.engine.script = script
    busy = [asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(5)]
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 1)
    answer = await ask(house.port, "/tokenize", {"model": MODEL}, key=house.key.text)
    assert answer.status == 200
    release.set()
    await asyncio.gather(*busy)


async def test_a_full_line_is_429(house: House) -> None:
    """With a time to come again, in the client's shape."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    house.engine.script = script
    house.gate.traffic.settings = replace(house.settings, queue_limit=1)
    house.publish(
        routes=(replace(house.route, replicas=(replace(house.route.replicas[0], slots=1),)),)
    )
    waiting = [
        asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(2)
    ]
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 1)
    answer = await ask(house.port, CHAT, BODY, key=house.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    release.set()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}


async def test_leaving_the_line_frees_the_place(house: House) -> None:
    """A client that goes while it waits never reaches the engine."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    house.engine.script = script
    busy = [asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(4)]
    await house.until(lambda: len(house.engine.calls) == 4)
    async with RawClient(house.port) as client:
        await client.send(CHAT, BODY, key=house.key.text)
        await house.until(lambda: house.gate.traffic.queues["small"].waiting == 1)
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 0)
    release.set()
    await asyncio.gather(*busy)
    assert len(house.engine.calls) == 4
    assert house.recorded[0].outcome == "cancelled"
    assert house.recorded[0].prompt_tokens == 0


async def test_waiting_too_long_is_told(tmp_path, engine) -> None:
    """Plainly with 503; a stream that has heard comments, inside the stream."""
    house = House(tmp_path, engine)
    house.settings = replace(house.settings, queue_timeout_s=4, silence_s=0.05)
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.answer(ANSWER)

    engine.script = script
    async with house.open():
        busy = [
            asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(4)
        ]
        await house.until(lambda: len(engine.calls) == 4)
        plain, streamed = await asyncio.gather(
            ask(house.port, CHAT, BODY, key=house.key.text),
            ask(house.port, CHAT, {**BODY, "stream": True}, key=house.key.text),
        )
        assert (plain.status, plain.json["error"]["code"]) == (503, "queue_timeout")
        assert streamed.status == 200
        assert streamed.body.startswith(b": waiting\n\n: waiting\n\n")
        last = streamed.body.split(b"\n\n")[-2].removeprefix(b"data: ")
        assert json.loads(last)["error"]["code"] == "queue_timeout"
        release.set()
        await asyncio.gather(*busy)


async def test_a_hold_keeps_requests_for_the_next_generation(house: House, engine) -> None:
    """Nothing is lost while the engine is swapped; answers come from the new generation."""
    house.publish(
        routes=(replace(house.route, mode="hold", replicas=(), hold_until=int(time.time()) + 60),)
    )
    held = [
        asyncio.create_task(
            ask(house.port, CHAT, {**BODY, "stream": number % 2 == 0}, key=house.key.text)
        )
        for number in range(6)
    ]
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 6)
    assert engine.calls == []
    models = await ask(house.port, "/v1/models", key=house.key.text, method="GET")
    assert [card["id"] for card in models.json["data"]] == [MODEL]
    house.publish(
        routes=(
            replace(
                house.route,
                public_name="called otherwise from now on",
                generation=4,
                generation_uid="small/4",
                replicas=(ReplicaRoute(uid="small-4-0", url=engine.url, slots=2),),
            ),
        )
    )
    answers = await asyncio.gather(*held)
    assert {(a.status, a.headers["x-mm-generation"]) for a in answers} == {(200, "small/4")}
    assert {usage.generation for usage in house.recorded} == {4}


async def test_a_hold_is_for_every_endpoint(house: House, engine) -> None:
    """What does not need a slot waits too: there is no engine to ask."""
    held = replace(house.route, mode="hold", replicas=(), hold_until=int(time.time()) + 60)
    house.publish(routes=(held,))
    request = asyncio.create_task(
        ask(house.port, "/tokenize", {"model": MODEL}, key=house.key.text)
    )
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 1)
    house.publish()
    assert (await request).status == 200


async def test_a_hold_that_comes_between_is_kept(house: House, engine) -> None:
    """A request that was let in when the engine had just gone waits for the next one."""
    port = engine.port
    await engine.stop()
    request = asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text))
    await house.until(lambda: house.gate.traffic.queues["small"].running == 1)
    held = replace(house.route, mode="hold", hold_until=int(time.time()) + 60)
    house.publish(routes=(held,))
    await asyncio.sleep(1.0)
    assert not request.done()
    await engine.start(port)
    await asyncio.sleep(0.4)
    assert engine.calls == [], "nothing goes to a held generation"
    house.publish(routes=(replace(house.route, generation=4, generation_uid="small/4"),))
    answer = await request
    assert (answer.status, answer.headers["x-mm-generation"]) == (200, "small/4")


async def test_a_stream_that_was_held_does_not_name_the_wrong_generation(tmp_path, engine) -> None:
    """Its head goes out with the first comment, before anybody knows who will answer."""
    house = House(tmp_path, engine)
    house.settings = replace(house.settings, silence_s=0.2)
    async with house.open():
        held = replace(house.route, mode="hold", hold_until=int(time.time()) + 60)
        house.publish(routes=(held,))
        async with RawClient(house.port) as client:
            await client.send(CHAT, {**BODY, "stream": True}, key=house.key.text)
            _, headers = await client.head()
            assert "x-mm-generation" not in headers
            assert await client.chunk() == b": waiting\n\n"
            house.publish(routes=(replace(house.route, generation=4, generation_uid="small/4"),))
            while data := await client.chunk():
                last = data
        assert last.endswith(b"data: [DONE]\n\n")
        assert house.recorded[0].generation == 4


async def test_a_hold_that_ends_in_nothing_is_told(house: House) -> None:
    """Closed while requests wait: 503 at once."""
    house.publish(routes=(replace(house.route, mode="hold", hold_until=int(time.time()) + 60),))
    held = asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text))
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 1)
    house.publish(routes=(replace(house.route, mode="closed"),))
    answer = await asyncio.wait_for(held, PATIENCE_S)
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_unavailable")


async def test_keys_are_served_in_turn_over_the_wire(house: House) -> None:
    """A single request of another key is not behind a crowd's."""
    other = new_key(PEPPER)
    house.publish(
        keys=(house.record, replace(house.record, key_id=other.key_id, digest=other.digest))
    )
    held = Held(house.engine)

    def one(name: str, key: str) -> asyncio.Task:
        body = {**BODY, "user": name}
        return asyncio.create_task(ask(house.port, CHAT, body, key=key))

    asked = [one("crowd", house.key.text) for _ in range(20)]
    await house.until(lambda: (held.now, house.gate.traffic.queues["small"].waiting) == (4, 16))
    asked.append(one("single", other.text))
    await house.until(lambda: house.gate.traffic.queues["small"].waiting == 17)
    held.let_go(4)
    await house.until(lambda: len(house.engine.calls) == 8)
    order = [call.json["user"] for call in house.engine.calls]
    assert order.count("single") == 1, "among the next four"
    held.let_go(17)
    await asyncio.gather(*asked)


async def test_the_replica_with_room_is_chosen_and_a_dead_one_is_passed_over(
    house: House, engine
) -> None:
    """Two replicas share the load; when one does not listen, the other answers for it."""
    second = type(engine)()
    await second.start()
    replicas = (
        ReplicaRoute(uid="a", url=engine.url, slots=2),
        ReplicaRoute(uid="b", url=second.url, slots=2),
    )
    house.publish(routes=(replace(house.route, replicas=replicas),))
    held = Held(engine)
    second.script = engine.script
    asked = [asyncio.create_task(ask(house.port, CHAT, BODY, key=house.key.text)) for _ in range(4)]
    await house.until(lambda: held.now == 4)
    assert (len(engine.calls), len(second.calls)) == (2, 2)
    held.let_go(4)
    await asyncio.gather(*asked)
    await second.stop()
    engine.script = chat_answer
    answers = [await ask(house.port, CHAT, BODY, key=house.key.text) for _ in range(8)]
    assert {answer.status for answer in answers} == {200}
