"""What a request may cost at most: caps as its engine reads them, several answers in one request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mmadmin.core.snapshot import AnswerFields, Route
from mmadmin.gate.endpoints import POSTS
from mmadmin.gate.queue import Place, Queue
from mmadmin.gate.rewriting import worst_case
from tests.gate.harness import MODEL, Harness, route_to
from tests.gate.raw import ask
from tests.gate.stub import DONE, FINISH, USAGE, Call, delta

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONTEXT = 2048
ROUTE = route_to("http://127.0.0.1:1", slots=4)
NOBODY_KNOWS = replace(ROUTE, answers=AnswerFields())


def reserved(path: str, payload: dict, route: Route = ROUTE, answers: int = 1) -> int:
    """Tokens reserved for an answer, of a request with a prompt of one."""
    return worst_case(POSTS[path.encode()], route, 4, payload, answers) - 1


@pytest.mark.parametrize(
    ("path", "payload", "tokens"),
    [
        (CHAT, {"max_tokens": 60}, 60),
        (CHAT, {"max_tokens": 1, "n_predict": 60}, 60),
        (CHAT, {"max_completion_tokens": 1, "n_predict": 60}, 60),
        (CHAT, {"max_tokens": 60, "n_predict": 1}, 60),
        (CHAT, {"max_output_tokens": 1}, None),
        (CHAT, {"max_tokens": 5, "n_predict": -1}, None),
        (CHAT, {"max_tokens": 5, "n_predict": None}, 5),
        (CHAT, {"max_tokens": None}, None),
        (CHAT, {"max_tokens": 12.7}, 13),
        (CHAT, {"max_tokens": 1e300}, None),
        (CHAT, {"max_tokens": True}, 1),
        (CHAT, {"max_tokens": False}, None),
        (CHAT, {"max_tokens": "5"}, None),
        (CHAT, {}, None),
        (TEXT, {"max_tokens": 1, "n_predict": 12}, 12),
        (RESPONSES, {"max_output_tokens": 12, "max_tokens": 1}, 12),
        (RESPONSES, {"max_output_tokens": 1, "n_predict": 12}, 12),
        (MESSAGES, {"max_tokens": 7, "n_predict": 60}, 7),
        (MESSAGES, {"max_completion_tokens": 1}, None),
        (MESSAGES, {"max_tokens": None, "max_output_tokens": 1}, None),
    ],
)
def test_the_reservation_follows_the_engine(path: str, payload: dict, tokens: int | None) -> None:
    """The largest of the fields that it reads on that endpoint; without one, all of the context."""
    assert reserved(path, payload) == (CONTEXT - 1 if tokens is None else tokens)


def test_without_knowledge_of_the_engine_the_api_counts() -> None:
    """A route that says nothing: the fields of the API."""
    assert reserved(CHAT, {"max_tokens": 5, "n_predict": 60}, NOBODY_KNOWS) == 5
    assert reserved(RESPONSES, {"max_output_tokens": 6}, NOBODY_KNOWS) == 6


def test_several_answers_cost_several_times() -> None:
    """Each has its own cap and its own context; prompts as token ids count each id."""
    assert reserved(TEXT, {"max_tokens": 30}, answers=4) == 120
    assert reserved(TEXT, {}, answers=4) == 4 * CONTEXT - 1
    ids = {"prompt": [[1] * 500, [2] * 400], "max_tokens": 1}
    assert reserved(TEXT, ids, answers=2) == 900 + 2 - 1


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"n": 5}, "n"),
        (CHAT, {"n_cmpl": 5}, "n"),
        (TEXT, {"prompt": ["x"] * 5}, "prompt"),
        (TEXT, {"prompt": [[1], [2], [3]], "n": 2}, "n"),
    ],
)
async def test_more_answers_than_slots_are_refused(
    harness: Harness, path: str, more: dict, param: str
) -> None:
    """400 with the numbers; the engine hears nothing."""
    answer = await ask(harness.port, path, {"model": MODEL, **more}, key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (400, "too_many_completions")
    assert answer.json["error"]["param"] == param
    assert harness.engine.calls == []


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (TEXT, {"prompt": ["a", "b", "c", "d"]}),
        (CHAT, {"n": 4, "messages": []}),
        ("/v1/embeddings", {"input": ["x"] * 50}),
    ],
)
async def test_several_answers_take_several_slots(harness: Harness, path: str, more: dict) -> None:
    """While they run nobody else is let in beside them, and the next one waits in the queue."""
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await call.answer({"usage": {"prompt_tokens": 1, "total_tokens": 2}})

    harness.engine.script = script
    many = asyncio.create_task(
        ask(harness.port, path, {"model": MODEL, **more}, key=harness.key.text)
    )
    await harness.until(lambda: harness.engine.calls)
    queue = harness.gate.traffic.queues["small"]
    assert queue.running == 4
    one = asyncio.create_task(
        ask(harness.port, CHAT, {"model": MODEL, "messages": []}, key=harness.key.text)
    )
    await harness.until(lambda: queue.waiting)
    go_on.set()
    assert (await many).status == 200
    assert (await one).headers["x-mm-queue-position"] == "1"
    assert queue.running == 0
    assert all(upstream.running == 0 for upstream in harness.gate.traffic.upstreams.values())


async def test_several_answers_are_counted_where_one_is_reported(harness: Harness) -> None:
    """A whole answer: by the lengths of the others, marked as an estimate."""
    text = "seventeen times "
    choices = [{"index": i, "text": text * size} for i, size in enumerate((2, 4, 1))]
    usage = {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}
    harness.engine.script = lambda call: call.answer({"choices": choices, "usage": usage})
    body = {"model": MODEL, "prompt": ["a" * 400, "b", "c"]}
    await ask(harness.port, TEXT, body, key=harness.key.text)
    (recorded,) = harness.recorded
    assert recorded.completion_tokens == 8 + 16 + 4
    assert recorded.prompt_tokens > 100
    assert not recorded.exact


async def test_each_answer_of_a_stream_is_counted(harness: Harness) -> None:
    """Every usage event is that of one answer: their sum, for one prompt."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a") + FINISH + USAGE + delta("b") + FINISH + USAGE + DONE)
        await call.end()

    harness.engine.script = script
    body = {"model": MODEL, "messages": [], "n": 2, "stream": True}
    answer = await ask(harness.port, CHAT, body, key=harness.key.text)
    assert b'"usage"' not in answer.body
    (recorded,) = harness.recorded
    assert (recorded.prompt_tokens, recorded.completion_tokens) == (11, 6)
    assert recorded.exact


def test_a_large_request_keeps_its_turn() -> None:
    """Later small ones do not pass it; one that needs more slots than there are goes alone."""
    queue = Queue(capacity=4, limit=10)
    assert queue.try_enter(3)
    large, small = Place("a", lambda: None, 4), Place("b", lambda: None)
    queue.wait(large)
    assert not queue.try_enter(), "somebody waits"
    queue.wait(small)
    queue.leave(3)
    assert (large.admitted, small.admitted) == (True, False)
    queue.leave(4)
    assert small.admitted
    queue.capacity = 2
    queue.leave()
    assert queue.try_enter(4)
    assert not queue.try_enter()
