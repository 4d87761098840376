"""A generation on trial: who may ask it, which generation answers, whose usage, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from mmadmin.core.access import new_key
from mmadmin.core.snapshot import KeyRecord, ReplicaRoute, Route
from tests.gate.harness import MODEL, PEPPER, Harness, record_of
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


def trial_route(harness: Harness, engine: StubEngine, *, slots: int = 1) -> Route:
    """Generation 4 of the usual deployment, beside generation 3."""
    return replace(
        harness.route,
        public_name=TRIAL,
        generation=4,
        generation_uid=TRIAL,
        replicas=(ReplicaRoute(uid="small-4-t", socket=engine.socket, slots=slots),),
        trial=True,
    )


def players(harness: Harness) -> KeyRecord:
    """The harness's key as the playground has one."""
    return replace(harness.record, trials=True)


async def test_both_generations_answer_side_by_side(harness: Harness, other: StubEngine) -> None:
    """Each name reaches its own engine; the header and the usage records say which generation it was."""
    harness.engine.script, other.script = says("three"), says("four")
    harness.publish(keys=[players(harness)], trials=[trial_route(harness, other)])
    live, tried = await asyncio.gather(
        ask(harness.port, CHAT, chat(MODEL), key=harness.key.text),
        ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text),
    )
    assert (live.headers["x-mm-generation"], tried.headers["x-mm-generation"]) == (
        "small/3",
        TRIAL,
    )
    assert live.json["choices"] == [{"message": "three"}]
    assert tried.json["choices"] == [{"message": "four"}]
    booked = {(usage.deployment, usage.generation, usage.outcome) for usage in harness.recorded}
    assert booked == {("small", 3, "ok"), ("small", 4, "ok")}


async def test_to_other_keys_a_trial_does_not_exist(harness: Harness, other: StubEngine) -> None:
    """The 404 of an unknown model, and no entry in the list of models."""
    harness.publish(trials=[trial_route(harness, other)])
    refused = await ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text)
    unknown = await ask(harness.port, CHAT, chat("small/9"), key=harness.key.text)
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
    same_words = unknown.json["error"]["message"].replace("small/9", TRIAL)
    assert refused.json["error"]["message"] == same_words
    models = await ask(harness.port, "/v1/models", key=harness.key.text, method="GET")
    assert [model["id"] for model in models.json["data"]] == [MODEL]
    one = await ask(harness.port, f"/v1/models/{TRIAL}", key=harness.key.text, method="GET")
    assert one.status == 404
    assert other.calls == []


async def test_a_scope_holds_for_trials_too(harness: Harness, other: StubEngine) -> None:
    """A key that may try generations, but not of this deployment, may not try this one."""
    elsewhere = new_key(PEPPER)
    key = replace(record_of(elsewhere), trials=True, deployments=("other",))
    harness.publish(keys=[key], trials=[trial_route(harness, other)])
    answer = await ask(harness.port, CHAT, chat(TRIAL), key=elsewhere.text)
    assert (answer.status, other.calls) == (404, [])


async def test_the_playground_sees_it_among_the_models(harness: Harness, other: StubEngine) -> None:
    """By its uid, with its own context."""
    route = replace(trial_route(harness, other), context_per_slot=4096)
    harness.publish(keys=[players(harness)], trials=[route])
    models = await ask(harness.port, "/v1/models", key=harness.key.text, method="GET")
    assert {m["id"]: m["context_length"] for m in models.json["data"]} == {
        MODEL: 2048,
        TRIAL: 4096,
    }
    one = await ask(harness.port, f"/v1/models/{TRIAL}", key=harness.key.text, method="GET")
    assert (one.status, one.json["id"]) == (200, TRIAL)


async def test_a_model_that_is_not_named_is_never_a_trial(
    harness: Harness, other: StubEngine
) -> None:
    """Where a request may leave the model out, the only live one is meant."""
    harness.publish(keys=[players(harness)], trials=[trial_route(harness, other)])
    answer = await ask(harness.port, "/tokenize", {"content": "x"}, key=harness.key.text)
    assert (answer.status, answer.headers["x-mm-generation"]) == (200, "small/3")
    assert other.calls == []


async def test_a_public_name_goes_before_a_trial(harness: Harness, other: StubEngine) -> None:
    """A deployment that clients call by the same name is not covered by a trial."""
    named = replace(harness.route, public_name=TRIAL)
    harness.publish(routes=[named], keys=[players(harness)], trials=[trial_route(harness, other)])
    answer = await ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text)
    assert answer.headers["x-mm-generation"] == "small/3"


async def test_a_busy_trial_holds_up_no_live_request(harness: Harness, other: StubEngine) -> None:
    """The trial has its own queue: live requests pass while it is full, and it has its own slots."""
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.answer({"choices": []})

    other.script = slow
    harness.publish(keys=[players(harness)], trials=[trial_route(harness, other, slots=1)])
    first = asyncio.create_task(ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text))
    second = asyncio.create_task(ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text))
    await harness.until(lambda: harness.gate.traffic.queues[TRIAL].waiting == 1)
    live = await ask(harness.port, CHAT, chat(MODEL), key=harness.key.text)
    assert live.status == 200
    assert (len(other.calls), harness.gate.traffic.queues["small"].waiting) == (1, 0)
    release.set()
    assert [(await first).status, (await second).status] == [200, 200]


async def test_the_end_of_a_trial_lets_its_requests_finish(
    harness: Harness, other: StubEngine
) -> None:
    """The one at the engine goes on, the one that waits gets an error, and its queue is dropped."""
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.answer({"choices": []})

    other.script = slow
    harness.publish(keys=[players(harness)], trials=[trial_route(harness, other, slots=1)])
    at_engine = asyncio.create_task(ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text))
    await harness.until(lambda: other.calls)
    waiting = asyncio.create_task(ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text))
    await harness.until(lambda: harness.gate.traffic.queues[TRIAL].waiting == 1)
    harness.publish(keys=[players(harness)])
    refused = await waiting
    assert (refused.status, refused.json["error"]["code"]) == (503, "model_unavailable")
    late = await ask(harness.port, CHAT, chat(TRIAL), key=harness.key.text)
    assert late.status == 404
    assert harness.gate.traffic.inflight == {TRIAL: 1}
    release.set()
    assert (await at_engine).status == 200
    harness.publish(keys=[players(harness)])
    assert set(harness.gate.traffic.queues) == {"small"}
    assert harness.gate.traffic.inflight == {}


async def test_a_stream_of_a_trial_is_marked(harness: Harness, other: StubEngine) -> None:
    """Streams too say which generation they come from."""
    harness.publish(keys=[players(harness)], trials=[trial_route(harness, other)])
    async with RawClient(harness.port) as client:
        await client.send(CHAT, chat(TRIAL, stream=True), key=harness.key.text)
        status, headers = await client.head()
    assert (status, headers["x-mm-generation"]) == (200, TRIAL)
