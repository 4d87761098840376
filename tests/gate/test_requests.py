"""Plain requests: endpoints, keys, headers, errors, usage records."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from mmadmin.core.access import engine_secret, new_key
from mmadmin.gate import upstream
from mmadmin.gate.endpoints import POSTS
from tests.gate.harness import MASTER, MODEL, PATIENCE_S, PEPPER, Harness
from tests.gate.raw import RawClient, ask
from tests.gate.stub import ANSWER

CHAT = "/v1/chat/completions"


def chat(**more) -> dict:
    """A request's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "17 * 23?"}], **more}


async def test_a_completion_goes_through_and_into_the_usage_records(harness: Harness) -> None:
    """The engine's bytes arrive unchanged, marked, and its token counts are booked."""
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.status == 200
    assert answer.json == ANSWER
    assert answer.headers["x-mm-generation"] == "small/3"
    assert answer.headers["x-request-id"].startswith("req_")
    (usage,) = harness.recorded
    assert usage.id == answer.headers["x-request-id"]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.exact) == (11, 9, True)
    assert (usage.status, usage.outcome, usage.endpoint) == (200, "ok", "chat")
    assert (usage.deployment, usage.generation, usage.key_id) == ("small", 3, harness.key.key_id)


async def test_the_engine_sees_its_own_secret_and_no_client_credential(harness: Harness) -> None:
    """Neither header form of the client's key reaches the engine, nor do cookies."""
    await ask(
        harness.port,
        CHAT,
        chat(),
        key=harness.key.text,
        headers={
            "X-Api-Key": harness.key.text,
            "Cookie": "a=b",
            "X-Forwarded-For": "10.0.0.1",
            "Accept-Encoding": "gzip, br",
        },
    )
    (call,) = harness.engine.calls
    assert call.headers["authorization"] == f"Bearer {engine_secret(MASTER, 'small-3-0')}"
    assert call.headers["accept-encoding"] == "identity"
    assert harness.key.text not in repr(call.headers)
    assert not {"x-api-key", "cookie", "x-forwarded-for"} & call.headers.keys()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../slots",
        "/v1/%2e%2e/props",
        "//slots",
        "/slots",
        "/props",
        "/slots/0?action=save",
        "/metrics",
        "/apply-template",
        "/v1/chat/completions/../../props",
        "/v1//chat/completions",
        "/V1/chat/completions",
        "/v1/chat%2fcompletions",
        "/v1/models/../../props",
        "/v1/models/%2e%2e%2f%2e%2e%2fprops",
        "/v1/models/",
        "/lora-adapters",
        "/completion",
        "/health/",
        "/",
        "/..;/props",
        "/v1/chat/completions;x=1",
        "http://127.0.0.1:1/props",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_nothing_else_reaches_the_engine(harness: Harness, path: str, method: str) -> None:
    """Every spelling of an engine's own paths is 404 in the client's shape."""
    answer = await ask(harness.port, path, b"{}", key=harness.key.text, method=method)
    assert answer.status in (404, 405)
    assert answer.json["error"]["code"] in ("unknown_url", "model_not_found", "method_not_allowed")
    assert harness.engine.calls == []


async def test_a_wrong_method_is_named(harness: Harness) -> None:
    """405 says what is allowed."""
    answer = await ask(harness.port, CHAT, key=harness.key.text, method="GET")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = await ask(harness.port, "/v1/models", b"{}", key=harness.key.text)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_models_are_those_that_the_key_may_use(harness: Harness) -> None:
    """The list and the single model follow the key's scope and what is live."""
    other = replace(harness.route, deployment="other", public_name="org/other-model")
    stopped = replace(
        harness.route, deployment="stopped", public_name="stopped", generation_uid=None, replicas=()
    )
    scoped = new_key(PEPPER)
    record = replace(
        harness.record, key_id=scoped.key_id, digest=scoped.digest, deployments=("other",)
    )
    harness.publish(routes=(harness.route, other, stopped), keys=(harness.record, record))
    answer = await ask(harness.port, "/v1/models", key=harness.key.text, method="GET")
    assert [card["id"] for card in answer.json["data"]] == [MODEL, "org/other-model"]
    answer = await ask(harness.port, "/v1/models", key=scoped.text, method="GET")
    assert [card["id"] for card in answer.json["data"]] == ["org/other-model"]
    for path in ("/v1/models/org%2Fother-model", "/v1/models/org/other-model"):
        answer = await ask(harness.port, path, key=scoped.text, method="GET")
        assert (answer.status, answer.json["id"]) == (200, "org/other-model")
    answer = await ask(harness.port, f"/v1/models/{MODEL}", key=scoped.text, method="GET")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_unknown_and_forbidden_models_get_the_same_error(harness: Harness) -> None:
    """A key learns nothing of deployments outside its scope."""
    scoped = new_key(PEPPER)
    record = replace(
        harness.record, key_id=scoped.key_id, digest=scoped.digest, deployments=("other",)
    )
    harness.publish(keys=(harness.record, record))
    forbidden = await ask(harness.port, CHAT, chat(), key=scoped.text)
    unknown = await ask(harness.port, CHAT, chat(model="nothing"), key=scoped.text)
    assert forbidden.status == unknown.status == 404
    assert forbidden.body == unknown.body.replace(b"nothing", MODEL.encode())
    error = forbidden.json["error"]
    assert f"`{MODEL}`" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}


async def test_refused_keys_get_one_answer_and_leave_no_trace(harness: Harness, capfd) -> None:
    """Missing, malformed, unknown, wrong and revoked keys; no key text anywhere after."""
    stranger, revoked = new_key(PEPPER), new_key(PEPPER)
    harness.publish(
        keys=(
            harness.record,
            replace(harness.record, key_id=revoked.key_id, digest=revoked.digest, state="revoked"),
        )
    )
    known_id = harness.key.text[: len("sk-mm-") + 13]
    texts = [
        "sk-something-else",
        harness.key.text[:-1] + ("0" if harness.key.text[-1] != "0" else "1"),
        stranger.text,
        revoked.text,
        known_id + stranger.text[len(known_id) :],
        "é" * 60,
    ]
    answers = [await ask(harness.port, CHAT, chat(), key=text) for text in texts]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].json["error"]["code"] == "invalid_api_key"
    missing = await ask(harness.port, CHAT, chat())
    assert missing.status == 401
    out = capfd.readouterr()
    traces = repr(
        (out, harness.gate.traffic.metrics.text(), harness.recorded, [a.headers for a in answers])
    )
    for text in (*texts[1:5], harness.key.text):
        assert text not in traces
    assert harness.engine.calls == []
    assert harness.recorded == []


async def test_expired_and_suspended_keys_get_their_own_errors(harness: Harness) -> None:
    """A proven key learns why it is refused."""
    for change, code in (
        ({"expires_at": int(time.time()) - 1}, "api_key_expired"),
        ({"state": "suspended"}, "api_key_suspended"),
    ):
        harness.publish(keys=(replace(harness.record, **change),))
        answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
        assert (answer.status, answer.json["error"]["code"]) == (401, code)


async def test_an_endpoint_outside_the_scope_is_refused(harness: Harness) -> None:
    """A key with a list of endpoints may use no others."""
    harness.publish(keys=(replace(harness.record, endpoints=("embeddings",)),))
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (403, "endpoint_not_allowed")
    assert [usage.outcome for usage in harness.recorded] == ["refused"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"messages":[]}', "missing_model"),
        (b'{"model":3}', "missing_model"),
        (b'{"model":""}', "missing_model"),
    ],
)
async def test_a_bad_body_is_explained(harness: Harness, body: bytes, code: str) -> None:
    """400 with a stable code; nothing reaches the engine."""
    answer = await ask(harness.port, CHAT, body, key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (400, code)
    assert harness.engine.calls == []


async def test_a_body_over_the_limit_is_413(harness: Harness) -> None:
    """Announced or chunked, in the client's shape, before the engine hears of it."""
    harness.gate.settings = replace(harness.settings, body_limit_bytes=1000)
    answer = await ask(harness.port, CHAT, b"x" * 1001, key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (413, "request_too_large")
    async with RawClient(harness.port) as client:
        await client.send(
            CHAT,
            key=harness.key.text,
            headers={"Transfer-Encoding": "chunked", "Content-Length": ""},
        )
        for _ in range(3):
            client.writer.write(b"190\r\n" + b"x" * 400 + b"\r\n")
            await client.writer.drain()
            await asyncio.sleep(0.01)
        answer = await client.answer()
    assert answer.status == 413
    assert harness.engine.calls == []


async def test_headers_over_the_limit_are_431(harness: Harness) -> None:
    """One long or many small, with or without a key, before anything else is looked at."""
    for headers in ({"X-Long": "x" * 70_000}, {f"X-{n}": "y" * 60 for n in range(1200)}):
        for key in (harness.key.text, None):
            answer = await ask(harness.port, CHAT, chat(), key=key, headers=headers)
            assert (answer.status, answer.json["error"]["code"]) == (431, "headers_too_large")
            assert answer.json["error"]["type"] == "invalid_request_error"
    assert harness.engine.calls == []


async def test_a_packed_body_is_415(harness: Harness) -> None:
    """The gate reads the body; what it cannot read is an error of the request."""
    answer = await ask(
        harness.port, CHAT, chat(), key=harness.key.text, headers={"Content-Encoding": "gzip"}
    )
    assert (answer.status, answer.json["error"]["type"]) == (415, "invalid_request_error")
    assert harness.engine.calls == []


async def test_many_large_bodies_are_bounded(harness: Harness) -> None:
    """Uploads together cannot fill the memory; what they held is given back."""
    harness.gate.settings = replace(harness.settings, body_limit_bytes=1000)
    async with AsyncExitStack() as stack:
        for number in range(1, 18):
            client = await stack.enter_async_context(RawClient(harness.port))
            await client.send(
                CHAT,
                b"x" * 999,
                key=harness.key.text,
                headers={"Content-Length": "1000"},
            )
            if number <= 16:  # it is there before the next one comes
                await harness.until(
                    lambda all_=number * 999: harness.gate.traffic.body_bytes == all_
                )
        answer = await asyncio.wait_for(client.answer(), PATIENCE_S)
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
    await harness.until(lambda: harness.gate.traffic.requests == {})
    assert harness.gate.traffic.body_bytes == 0


async def test_what_is_stopped_answers_503(harness: Harness) -> None:
    """A known deployment without a live generation says so, with a time to come again."""
    harness.publish(routes=(replace(harness.route, generation_uid=None, replicas=()),))
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_unavailable")
    assert int(answer.headers["retry-after"]) > 0


async def test_an_engine_that_does_not_listen_is_503(harness: Harness) -> None:
    """Nothing was sent, so coming again is right."""
    await harness.engine.stop()
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_unavailable")
    assert harness.gate.traffic.inflight == {}
    assert harness.gate.traffic.queues["small"].running == 0


@pytest.mark.parametrize("path", sorted(path.decode() for path in POSTS))
async def test_every_endpoint_arrives_at_its_own_path(harness: Harness, path: str) -> None:
    """The endpoints are complete, and usage records use the scope's name."""
    body: bytes | dict = {"model": MODEL, "input": "x"}
    headers = {}
    if POSTS[path.encode()].body == "form":
        body = (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + MODEL.encode()
            + b'\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
            b"Content-Type: audio/wav\r\n\r\n\x00\xff\r\n--b--\r\n"
        )  # fmt: skip
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await ask(harness.port, path, body, key=harness.key.text, headers=headers)
    assert answer.status == 200
    (call,) = harness.engine.calls
    assert call.path == POSTS[path.encode()].upstream
    if headers:
        assert call.body == body
        assert call.headers["content-type"] == headers["Content-Type"]
    assert harness.recorded[0].endpoint == POSTS[path.encode()].name


async def test_tokenize_finds_the_only_model(harness: Harness) -> None:
    """Clients of an engine's own tokenizer do not send a model."""
    answer = await ask(harness.port, "/tokenize", {"content": "x"}, key=harness.key.text)
    assert answer.status == 200
    harness.publish(routes=(harness.route, replace(harness.route, public_name="b", deployment="b")))
    answer = await ask(harness.port, "/tokenize", {"content": "x"}, key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (400, "missing_model")


@pytest.mark.parametrize(
    ("status", "body", "want", "code"),
    [
        (
            500,
            {"error": {"code": 500, "message": 'Jinja Exception: reasoning_effort must be "none"', "type": "server_error"}},
            400,
            "template_refused",
        ),
        (
            400,
            {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 8}},
            400,
            "context_length_exceeded",
        ),
        (401, {"error": {"message": "Invalid API Key", "code": 401}}, 502, "upstream_error"),
        (503, {"error": {"message": "Loading model", "code": 503}}, 503, "model_unavailable"),
        (404, {"error": {"message": "File Not Found", "code": 404}}, 400, "not_supported"),
        (501, {"error": {"message": "no embeddings", "code": 501}}, 400, "not_supported"),
        (400, {"error": {"message": "bad field", "code": 400}}, 400, None),
        (422, {"detail": [{"loc": ["body"], "msg": "bad"}]}, 422, None),
        (500, b"<html>oops</html>", 500, "upstream_error"),
        (500, {"error": {"message": "Failed to parse tools: [json.exception]", "code": 500}}, 400, None),
        (500, {"error": {"message": "image input is not supported - hint", "code": 500}}, 400, "input_not_supported"),
        (502, b"", 502, "upstream_error"),
    ],
)  # fmt: skip
async def test_engine_refusals_are_translated(harness: Harness, status, body, want, code) -> None:
    """OpenAI's shape with the engine's words, and never the engine's own 401."""
    harness.engine.script = lambda call: call.answer(body, status)
    for streamed in (False, True):
        answer = await ask(harness.port, CHAT, chat(stream=streamed), key=harness.key.text)
        assert answer.status == want
        assert answer.json["error"]["code"] == code
        assert answer.json["error"]["message"]
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert "www-authenticate" not in answer.headers
    assert [usage.outcome for usage in harness.recorded] == [
        "failed" if want >= 500 else "refused"
    ] * 2
    assert harness.engine.connections <= 2


async def test_template_refusals_are_counted(harness: Harness) -> None:
    """By deployment, for whoever owns the template."""
    body = {"error": {"message": "Jinja Exception: no", "code": 500}}
    harness.engine.script = lambda call: call.answer(body, 500)
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.json["error"]["message"] == "no"
    text = harness.gate.traffic.metrics.text().decode()
    assert 'mm_gate_template_refusals_total{deployment="small",worker="0"} 1.0' in text


async def test_hop_by_hop_headers_stop_here(harness: Harness) -> None:
    """Also those that `Connection` lists; the rest passes; nothing comes twice."""

    async def script(call) -> None:
        body = b'{"usage":{"prompt_tokens":1,"total_tokens":1}}'
        await call.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: keep-alive, X-Hop\r\n"
            b"X-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Kept: yes\r\nSet-Cookie: a=b\r\nServer: e\r\n"
            b"X-Request-Id: theirs\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    harness.engine.script = script
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.headers["x-kept"] == "yes"
    assert answer.headers["x-request-id"] != "theirs"
    assert not {"x-hop", "keep-alive", "set-cookie", "server"} & answer.headers.keys()


async def test_a_compressed_answer_passes_as_it_is_and_is_still_booked(harness: Harness) -> None:
    """An engine that ignores `identity`: header and bytes agree."""
    packed = gzip.compress(json.dumps(ANSWER).encode())
    harness.engine.script = lambda call: call.answer(packed, Content_Encoding="gzip")
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-length"] == str(len(packed))
    assert gzip.decompress(answer.body) == json.dumps(ANSWER).encode()
    assert harness.recorded[0].completion_tokens == 9


async def test_a_compressed_401_of_the_engine_is_not_the_clients(harness: Harness) -> None:
    """The body is replaced, so no encoding header may stay."""
    packed = gzip.compress(b'{"error":{"message":"Invalid API Key"}}')
    harness.engine.script = lambda call: call.answer(packed, 401, Content_Encoding="gzip")
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.status == 502
    assert "content-encoding" not in answer.headers
    assert answer.json["error"]["code"] == "upstream_error"


async def test_numbers_of_any_size_reach_the_engine_unchanged(harness: Harness) -> None:
    """The body is not written anew: what the client wrote is what the engine reads."""
    body = b'{"model":"small-model","seed":123456789012345678901234567890,"temperature":1.10,"x":1e400}'
    await ask(harness.port, CHAT, body.replace(b',"x":1e400', b""), key=harness.key.text)
    assert harness.engine.calls[0].body == body.replace(b',"x":1e400', b"")
    streamed = b' \n{"model":"small-model","stream":true,"seed":123456789012345678901234567890}'
    await ask(harness.port, CHAT, streamed, key=harness.key.text)
    assert harness.engine.calls[1].body == (
        b' \n{"stream_options":{"include_usage":true},'
        b'"model":"small-model","stream":true,"seed":123456789012345678901234567890}'
    )


async def test_a_kept_connection_that_the_engine_closed_costs_nothing(harness: Harness) -> None:
    """The race between an idle close and the next request is not the client's problem."""

    async def once(call) -> None:
        await call.answer(ANSWER)
        if len(harness.engine.calls) == 2:
            return
        # the next request on this connection is cut without a byte
        await call.reader.readuntil(b"\r\n\r\n")
        call.reset()

    harness.engine.script = once
    for _ in range(2):
        answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
        assert answer.status == 200
    assert len(harness.recorded) == 2


async def test_an_engine_that_dies_before_its_head_is_502(harness: Harness) -> None:
    """On a fresh connection the request may have been read: it is not repeated."""

    async def die(call) -> None:
        call.reset()

    harness.engine.script = die
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")
    assert len(harness.engine.calls) == 1
    assert harness.recorded[0].outcome == "failed"


async def test_an_answer_cut_short_is_502(harness: Harness) -> None:
    """Half a JSON body never reaches a client as a success."""

    async def script(call) -> None:
        await call.head(Content_Type="application/json", Content_Length="1000")
        await call.write(b'{"choices":[')
        call.close()

    harness.engine.script = script
    answer = await ask(harness.port, CHAT, chat(), key=harness.key.text)
    assert answer.status == 502
    assert harness.recorded[0].outcome == "failed"
    assert harness.recorded[0].exact is False


async def test_requests_of_one_client_connection_follow_each_other(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep-alive towards the client, and one connection towards the engine."""
    monkeypatch.setattr(upstream, "IDLE_LIMIT_S", PATIENCE_S)
    async with RawClient(harness.port) as client:
        for _ in range(20):
            await client.send(CHAT, chat(), key=harness.key.text)
            assert (await client.answer()).status == 200
    assert harness.engine.connections == 1
