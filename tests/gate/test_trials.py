"""A generation on trial: who may ask it, which generation answers, whose usage, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from mmadmin.core.access import new_key
from mmadmin.core.snapshot import KeyRecord, ReplicaRoute, Route
from tests.gate.house import MODEL, PEPPER, House, record_of
from tests.gate.raw import RawClient, ask
from tests.gate.stub import Call, StubEngine

CHAT = "/v1/chat/completions"
TRIAL = "small/4"


def chat(model: str, **more) -> dict:
    """A request's body."""
    return {"model": model, "messages": [{"role": "user", "content": "17 * 23?"}], **more}


def says(text: str):
    """An engine that says one thing."""

    async def script(call: Call) -> None:
        await call.answer({"object": "chat.completion", "choices": [{"message": text}]})

    return script


@pytest_asyncio.fixture
async def other() -> AsyncIterator[StubEngine]:
    """The engine of the generation on trial."""
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


def trial_route(house: House, engine: StubEngine, *, slots: int = 1) -> Route:
    """Generation 4 of the usual deployment, beside generation 3."""
    return replace(
        house.route,
        public_name=TRIAL,
        generation=4,
        generation_uid=TRIAL,
        replicas=(ReplicaRoute(uid="small-4-t", url=engine.url, slots=slots),),
        trial=True,
    )


def players(house: House) -> KeyRecord:
    """The house's key as the playground has one."""
    return replace(house.record, trials=True)


async def test_both_generations_answer_side_by_side(house: House, other: StubEngine) -> None:
    """Each name reaches its own engine; the header and the usage records say which generation it was."""
    house.engine.script, other.script = says("three"), says("four")
    house.publish(keys=[players(house)], trials=[trial_route(house, other)])
    live, tried = await asyncio.gather(
        ask(house.port, CHAT, chat(MODEL), key=house.key.text),
        ask(house.port, CHAT, chat(TRIAL), key=house.key.text),
    )
    assert (live.headers["x-mm-generation"], tried.headers["x-mm-generation"]) == (
        "small/3",
        TRIAL,
    )
    assert live.json["choices"] == [{"message": "three"}]
    assert tried.json["choices"] == [{"message": "four"}]
    booked = {(usage.deployment, usage.generation, usage.outcome) for usage in house.recorded}
    assert booked == {("small", 3, "ok"), ("small", 4, "ok")}


async def test_to_other_keys_a_trial_does_not_exist(house: House, other: StubEngine) -> None:
    """404 in the very words of an unknown model, and no line in the list of models."""
    house.publish(trials=[trial_route(house, other)])
    refused = await ask(house.port, CHAT, chat(TRIAL), key=house.key.text)
    unknown = await ask(house.port, CHAT, chat("small/9"), key=house.key.text)
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
    same_words = unknown.json["error"]["message"].replace("small/9", TRIAL)
    assert refused.json["error"]["message"] == same_words
    models = await ask(house.port, "/v1/models", key=house.key.text, method="GET")
    assert [model["id"] for model in models.json["data"]] == [MODEL]
    one = await ask(house.port, f"/v1/models/{TRIAL}", key=house.key.text, method="GET")
    assert one.status == 404
    assert other.calls == []


async def test_a_scope_holds_for_trials_too(house: House, other: StubEngine) -> None:
    """A key that may try generations, but not of this deployment, may not try this one."""
    elsewhere = new_key(PEPPER)
    key = replace(record_of(elsewhere), trials=True, deployments=("other",))
    house.publish(keys=[key], trials=[trial_route(house, other)])
    answer = await ask(house.port, CHAT, chat(TRIAL), key=elsewhere.text)
    assert (answer.status, other.calls) == (404, [])


async def test_the_playground_sees_it_among_the_models(house: House, other: StubEngine) -> None:
    """By its uid, with its own context."""
    route = replace(trial_route(house, other), context_per_slot=4096)
    house.publish(keys=[players(house)], trials=[route])
    models = await ask(house.port, "/v1/models", key=house.key.text, method="GET")
    assert {m["id"]: m["context_length"] for m in models.json["data"]} == {
        MODEL: 2048,
        TRIAL: 4096,
    }
    one = await ask(house.port, f"/v1/models/{TRIAL}", key=house.key.text, method="GET")
    assert (one.status, one.json["id"]) == (200, TRIAL)


async def test_a_model_that_is_not_named_is_never_a_trial(house: House, other: StubEngine) -> None:
    """Where a request may leave the model out, the only live one is meant."""
    house.publish(keys=[players(house)], trials=[trial_route(house, other)])
    answer = await ask(house.port, "/tokenize", {"content": "x"}, key=house.key.text)
    assert (answer.status, answer.headers["x-mm-generation"]) == (200, "small/3")
    assert other.calls == []


async def test_a_public_name_goes_before_a_trial(house: House, other: StubEngine) -> None:
    """A deployment that clients call by the same name is not covered by a trial."""
    named = replace(house.route, public_name=TRIAL)
    house.publish(routes=[named], keys=[players(house)], trials=[trial_route(house, other)])
    answer = await ask(house.port, CHAT, chat(TRIAL), key=house.key.text)
    assert answer.headers["x-mm-generation"] == "small/3"


async def test_a_busy_trial_holds_up_no_live_request(house: House, other: StubEngine) -> None:
    """The trial's line is its own: live requests pass while it is full, and it has its own slots."""
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.answer({"choices": []})

    other.script = slow
    house.publish(keys=[players(house)], trials=[trial_route(house, other, slots=1)])
    first = asyncio.create_task(ask(house.port, CHAT, chat(TRIAL), key=house.key.text))
    second = asyncio.create_task(ask(house.port, CHAT, chat(TRIAL), key=house.key.text))
    await house.until(lambda: house.gate.traffic.queues[TRIAL].waiting == 1)
    live = await ask(house.port, CHAT, chat(MODEL), key=house.key.text)
    assert live.status == 200
    assert (len(other.calls), house.gate.traffic.queues["small"].waiting) == (1, 0)
    release.set()
    assert [(await first).status, (await second).status] == [200, 200]


async def test_the_end_of_a_trial_lets_its_requests_finish(house: House, other: StubEngine) -> None:
    """The one at the engine goes on, the one that waits is told, and its line is forgotten."""
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.answer({"choices": []})

    other.script = slow
    house.publish(keys=[players(house)], trials=[trial_route(house, other, slots=1)])
    at_engine = asyncio.create_task(ask(house.port, CHAT, chat(TRIAL), key=house.key.text))
    await house.until(lambda: other.calls)
    waiting = asyncio.create_task(ask(house.port, CHAT, chat(TRIAL), key=house.key.text))
    await house.until(lambda: house.gate.traffic.queues[TRIAL].waiting == 1)
    house.publish(keys=[players(house)])
    refused = await waiting
    assert (refused.status, refused.json["error"]["code"]) == (503, "model_unavailable")
    late = await ask(house.port, CHAT, chat(TRIAL), key=house.key.text)
    assert late.status == 404
    assert house.gate.traffic.inflight == {TRIAL: 1}
    release.set()
    assert (await at_engine).status == 200
    house.publish(keys=[players(house)])
    assert set(house.gate.traffic.queues) == {"small"}
    assert house.gate.traffic.inflight == {}


async def test_a_stream_of_a_trial_is_marked(house: House, other: StubEngine) -> None:
    """Streams too say which generation they come from."""
    house.publish(keys=[players(house)], trials=[trial_route(house, other)])
    async with RawClient(house.port) as client:
        await client.send(CHAT, chat(TRIAL, stream=True), key=house.key.text)
        status, headers = await client.head()
    assert (status, headers["x-mm-generation"]) == (200, TRIAL)
