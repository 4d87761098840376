"""Streams over real sockets: bytes, cuts, silence, clients that leave, engines that die."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from mmadmin.core.access import new_key
from mmadmin.gate.relay import COMMENT
from tests.gate.harness import MODEL, PATIENCE_S, PEPPER, Harness
from tests.gate.raw import RawClient, ask
from tests.gate.stub import DONE, TIMED, USAGE, Call, delta, paused

CHAT = "/v1/chat/completions"


def chat(**more) -> dict:
    """A request's body."""
    return {"model": MODEL, "messages": [], "stream": True, **more}


def writes(pieces, *, end: bool = True):
    """A script that streams these HTTP chunks."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        for piece in pieces:
            await call.chunk(piece)
        if end:
            await call.end()

    return script


async def test_usage_is_asked_for_and_not_leaked(harness: Harness) -> None:
    """The client sees what the engine sends without the event; the usage record has the numbers."""
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.body == delta("17") + delta(" times") + delta(" 23") + TIMED + DONE
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-encoding" not in answer.headers
    assert answer.headers["x-accel-buffering"] == "no"
    assert harness.engine.calls[0].json["stream_options"] == {"include_usage": True}
    (usage,) = harness.recorded
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (11, 3, 5)
    assert (usage.exact, usage.streamed, usage.tokens_per_s_milli) == (True, True, 12_500)


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"include_usage": True}, False),
        ({"include_usage": False}, True),
        ({}, True),
        (None, True),
        ({"continuous": True}, True),
    ],
)
async def test_usage_reaches_those_who_ask(harness: Harness, options, *, hidden: bool) -> None:
    """Whatever the client's own stream_options say; other options stay."""
    answer = await ask(harness.port, CHAT, chat(stream_options=options), key=harness.key.text)
    assert (USAGE in answer.body) == (not hidden)
    sent = harness.engine.calls[0].json["stream_options"]
    assert sent == {**(options or {}), "include_usage": True}
    assert harness.recorded[0].completion_tokens == 3


async def test_split_at_every_byte_over_the_wire(harness: Harness) -> None:
    """The engine's writes cut at each byte of an event: the same bytes for the client."""
    event = 'data: {"choices":[{"delta":{"content":"é北😸"}}]}\r\n\r\n'.encode()
    stream = b": hello\n\n" + event + event + USAGE + DONE
    want = b": hello\n\n" + event + event + DONE
    async with RawClient(harness.port) as client:
        for at in range(1, len(stream)):
            harness.engine.script = writes([stream[:at], stream[at:]])
            await client.send(CHAT, chat(), key=harness.key.text)
            answer = await client.answer()
            assert answer.body == want, f"cut at {at}"
    assert all(usage.completion_tokens == 3 for usage in harness.recorded)
    assert len(harness.recorded) == len(stream) - 1


async def test_single_bytes_arrive_whole(harness: Harness) -> None:
    """One byte a write, with usage asked for: every byte passes as it comes."""
    stream = delta("é") + USAGE + DONE
    harness.engine.script = writes([stream[at : at + 1] for at in range(len(stream))])
    answer = await ask(
        harness.port, CHAT, chat(stream_options={"include_usage": True}), key=harness.key.text
    )
    assert answer.body == stream


async def test_the_first_event_does_not_wait_for_the_second(harness: Harness) -> None:
    """The first byte is there as soon as the engine has it."""
    go_on = asyncio.Event()

    harness.engine.script = paused(go_on)
    async with RawClient(harness.port) as client:
        await client.send(CHAT, chat(), key=harness.key.text)
        assert (await client.head())[0] == 200
        assert await client.chunk() == delta("a")
        go_on.set()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""


async def _silent_before_head(call: Call) -> None:
    await call.gone.wait()


async def _silent_after_head(call: Call) -> None:
    await call.head(Content_Type="text/event-stream")
    await call.gone.wait()


async def _writing(call: Call) -> None:
    await call.head(Content_Type="text/event-stream")
    for number in itertools.count():
        if call.gone.is_set():
            return
        await call.chunk(delta(str(number)))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    ("script", "streamed", "wait_for"),
    [
        (_silent_before_head, True, "call"),
        (_silent_after_head, True, "head"),
        (_writing, True, "chunk"),
        (_silent_before_head, False, "call"),
    ],
    ids=["before the head", "in prefill silence", "mid-stream", "not streamed"],
)
async def test_a_client_that_leaves_frees_the_engine(
    harness: Harness, script, wait_for: str, how: str, *, streamed: bool
) -> None:
    """The engine's connection closes, the slot is free, the usage record has the request.

    Not because anything was written to the client in vain: this gate breaks no silence.
    """
    harness.gate.settings = replace(harness.settings, silence_s=3600.0)
    harness.engine.script = script
    client = RawClient(harness.port)
    await client.__aenter__()
    await client.send(CHAT, chat(stream=streamed), key=harness.key.text)
    await harness.engine.arrived.wait()
    if wait_for in ("head", "chunk"):
        await client.head()
    if wait_for == "chunk":
        await client.chunk()
    if how == "reset":
        client.writer.transport.abort()
    else:
        client.writer.close()
    (call,) = harness.engine.calls
    await asyncio.wait_for(call.gone.wait(), PATIENCE_S)
    await harness.until(lambda: harness.recorded)
    (usage,) = harness.recorded
    assert (usage.status, usage.outcome, usage.exact) == (499, "cancelled", False)
    assert usage.prompt_tokens > 0
    assert (usage.completion_tokens > 0) == (wait_for == "chunk")
    assert harness.gate.traffic.inflight == {}
    assert harness.gate.traffic.queues["small"].running == 0
    assert harness.gate.traffic.requests == {}


async def test_leaving_before_the_usage_event_is_no_discount(harness: Harness) -> None:
    """Twenty deltas taken, usage not waited for: twenty tokens in the usage records, marked estimated."""
    more = asyncio.Event()

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        for number in range(20):
            await call.chunk(delta(str(number)))
        await more.wait()

    harness.engine.script = script
    async with RawClient(harness.port) as client:
        await client.send(CHAT, chat(), key=harness.key.text)
        await client.head()
        received = b""
        while received.count(b"\n\n") < 20:
            received += await client.chunk()
    await harness.until(lambda: harness.recorded)
    more.set()
    (usage,) = harness.recorded
    assert (usage.completion_tokens, usage.exact, usage.outcome) == (20, False, "cancelled")


async def _reset_after_three(call: Call) -> None:
    await call.head(Content_Type="text/event-stream")
    for text in "abc":
        await call.chunk(delta(text))
    await asyncio.sleep(0.02)
    call.reset()


async def _close_after_three(call: Call) -> None:
    await writes([delta(text) for text in "abc"], end=False)(call)
    call.close()


async def _end_without_done(call: Call) -> None:
    await writes([delta(text) for text in "abc"])(call)


async def _unframed_close(call: Call) -> None:
    await call.head(Content_Type="text/event-stream", Connection="close")
    await call.write(b"".join(delta(text) for text in "abc"))
    call.close()


@pytest.mark.parametrize(
    "script", [_reset_after_three, _close_after_three, _end_without_done, _unframed_close]
)
async def test_an_engine_that_dies_in_mid_stream_is_reported_in_the_stream(
    harness: Harness, script
) -> None:
    """An error event, no invented finish, no [DONE], the transport ended in order, one head."""
    harness.engine.script = script
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.whole
    assert answer.status == 200
    head = b"".join(delta(text) for text in "abc")
    assert answer.body.startswith(head)
    error = json.loads(answer.body[len(head) :].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_error"
    assert b"[DONE]" not in answer.body
    assert b"HTTP/1.1" not in answer.body
    assert b'"finish_reason":"' not in answer.body
    (usage,) = harness.recorded
    assert (usage.outcome, usage.exact, usage.completion_tokens) == ("failed", False, 3)


async def test_a_stream_framed_by_closing_is_whole_with_its_end_marker(harness: Harness) -> None:
    """HTTP/1.0 style framing with an end marker is a good answer."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream", Connection="close")
        await call.write(delta("a") + USAGE + DONE)
        call.close()

    harness.engine.script = script
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.body == delta("a") + DONE
    assert harness.recorded[0].outcome == "ok"


async def test_an_error_that_the_engine_streams_is_booked_as_failed(harness: Harness) -> None:
    """Passed on as it is; nothing is added to it."""
    error = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
    harness.engine.script = writes([delta("a"), error])
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.body == delta("a") + error
    assert harness.recorded[0].outcome == "failed"


async def read_until(client: RawClient, wanted: bytes, times: int = 1) -> bytes:
    """Read chunks until these bytes were in them so often."""
    received = b""
    while received.count(wanted) < times:
        received += await client.chunk()
    return received


async def test_silence_is_broken_by_comments(tmp_path, engine) -> None:
    """Before the engine's head, between events, never inside one; then the events go on."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, silence_s=0.1)
    heard = asyncio.Event()

    async def script(call: Call) -> None:
        await heard.wait()
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a"))
        heard.clear()
        await heard.wait()
        await call.chunk(delta("b")[:7])
        await asyncio.sleep(0.5)
        await call.chunk(delta("b")[7:] + DONE)
        await call.end()

    engine.script = script
    async with harness.open():
        for options in (None, {"include_usage": True}):
            heard.clear()
            async with RawClient(harness.port) as client:
                await client.send(CHAT, chat(stream_options=options), key=harness.key.text)
                status, headers = await client.head()
                assert (status, headers["x-mm-generation"]) == (200, "small/3")
                received = await read_until(client, COMMENT, 2)
                heard.set()
                received += await read_until(client, delta("a"))
                received += await read_until(client, COMMENT, 2)
                heard.set()
                while data := await client.chunk():
                    received += data
            assert received.replace(COMMENT, b"") == delta("a") + delta("b") + DONE


async def test_an_engine_that_refuses_after_a_silence_refuses_in_the_stream(
    tmp_path, engine
) -> None:
    """The head is gone: the refusal is an event in the client's dialect."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, silence_s=0.1)
    heard = asyncio.Event()

    async def script(call: Call) -> None:
        await heard.wait()
        await call.answer({"error": {"message": "no", "code": 400}}, 400)

    engine.script = script

    async def answered(path: str) -> bytes:
        """The last event of a stream whose head was there before the engine's."""
        heard.clear()
        async with RawClient(harness.port) as client:
            await client.send(path, chat(), key=harness.key.text)
            assert (await client.head())[0] == 200
            heard.set()
            received = b""
            while data := await client.chunk():
                received += data
        return received.split(b"\n\n")[-2]

    async with harness.open():
        last = await answered(CHAT)
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "no"
        event, data = (await answered("/v1/messages")).split(b"\n")
        assert event == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["error"] == {
            "type": "invalid_request_error",
            "message": "no",
        }


async def test_a_slow_reader_does_not_fill_the_gate(harness: Harness) -> None:
    """The engine is read no faster than the client reads."""
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.head(Content_Type="text/event-stream")
        block = delta("x" * 1000) * 60
        while not call.gone.is_set():
            await call.chunk(block)
            sent += len(block)

    harness.engine.script = script
    async with RawClient(harness.port) as client:
        await client.send(CHAT, chat(), key=harness.key.text)
        await client.head()
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.3)
            assert sent < 32 * 1024 * 1024, "the engine was read on and on"
    await harness.until(lambda: harness.recorded)
    assert harness.gate.traffic.requests == {}


async def test_a_suspended_key_is_called_suspended_in_its_streams(harness: Harness) -> None:
    """The same code and words as for its next request."""
    go_on = asyncio.Event()
    harness.engine.script = paused(go_on)
    async with RawClient(harness.port) as client:
        await client.send(CHAT, chat(), key=harness.key.text)
        await client.head()
        assert await client.chunk() == delta("a")
        harness.publish(keys=(replace(harness.record, state="suspended"),))
        received = b""
        while data := await client.chunk():
            received += data
    told = json.loads(received.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert told == answer.json["error"]
    assert told["code"] == "api_key_suspended"


async def test_a_revoked_key_ends_its_streams_at_once(harness: Harness) -> None:
    """In words, though neither the engine nor a timer stirs; another key's stream goes on."""
    harness.gate.settings = replace(harness.settings, silence_s=3600.0)
    other = new_key(PEPPER)
    record = replace(harness.record, key_id=other.key_id, digest=other.digest)
    harness.publish(keys=(harness.record, record))
    go_on = asyncio.Event()
    harness.engine.script = paused(go_on)
    async with RawClient(harness.port) as client, RawClient(harness.port) as neighbour:
        for one, key in ((client, harness.key), (neighbour, other)):
            await one.send(CHAT, chat(), key=key.text)
            await one.head()
            assert await one.chunk() == delta("a")
        harness.publish(keys=(replace(harness.record, state="revoked"), record))
        received = b""
        while data := await client.chunk():
            received += data
        await asyncio.wait_for(harness.engine.calls[0].gone.wait(), PATIENCE_S)
        go_on.set()
        assert await neighbour.chunk() == DONE
    last = received.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "invalid_api_key"
    assert harness.recorded[0].outcome == "cancelled"


async def test_a_request_that_takes_too_long_is_ended(tmp_path, engine) -> None:
    """The deadline answers 504 and frees the engine."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, request_timeout_s=1)
    engine.script = _silent_before_head
    async with harness.open():
        answer = await ask(harness.port, CHAT, chat(stream=False), key=harness.key.text)
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
        await asyncio.wait_for(engine.calls[0].gone.wait(), PATIENCE_S)
        assert harness.recorded[0].outcome == "failed"


@pytest.mark.parametrize(("within_s", "ends_well"), [(PATIENCE_S, True), (0.1, False)])
async def test_a_gate_that_stops_lets_streams_finish(
    tmp_path, engine, within_s: float, *, ends_well: bool
) -> None:
    """Streams that end within the bound end well; longer ones end with an error."""
    harness = Harness(tmp_path, engine)
    harness.stop_within_s = within_s
    go_on = asyncio.Event()
    engine.script = paused(go_on)
    client = RawClient(0)

    async def when_it_stops() -> None:
        await harness.until(lambda: harness.gate.traffic.stopping)
        if ends_well:
            go_on.set()

    async with harness.open():
        client.port = harness.port
        await client.__aenter__()
        await client.send(CHAT, chat(), key=harness.key.text)
        await client.head()
        await client.chunk()
        watching = asyncio.create_task(when_it_stops())
    # leaving the block has stopped the server
    await watching
    last = await client.chunk()
    if ends_well:
        assert last == DONE
    else:
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert await client.chunk() == b""
    client.writer.close()
    assert [usage.outcome for usage in harness.recorded] == ["ok" if ends_well else "failed"]
