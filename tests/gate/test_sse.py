"""The tap: same bytes out for every way of cutting, usage seen, and hidden when not asked for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.gate.sse import SseTap
from mmadmin.gate.tokens import Tokens, tokens_of_answer, tokens_of_events
from tests.gate.stub import DONE, FINISH, TIMED, USAGE, delta

TEXT = delta("é 北 😸").replace(b"\\u00e9", "é".encode())
WIDE = 'data: {"choices":[{"delta":{"content":"é北😸"}}]}\n\n'.encode()
TRAPS = delta('data: [DONE]\n\n "usage": {"x":1}, "choices":[] and "error"')
STREAMS = {
    "plain": WIDE + TEXT + FINISH + USAGE + DONE,
    "crlf": (WIDE + FINISH + USAGE + DONE).replace(b"\n", b"\r\n"),
    "cr": (WIDE + FINISH + USAGE + DONE).replace(b"\n", b"\r"),
    "comments": b": ping\n\n" + WIDE + b":\n\n" + FINISH + b": x\n" + USAGE + DONE,
    "traps": TRAPS + FINISH + USAGE + DONE,
    "no usage": WIDE + FINISH + DONE,
    "no end": WIDE + FINISH,
    "unfinished": WIDE + b"data: {",
    "null usage": WIDE.replace(b"{", b'{"usage":null,', 1) + FINISH + USAGE + DONE,
    "usage with choices": WIDE.replace(b"{", b'{"usage":{"prompt_tokens":1},', 1) + DONE,
}


def through(pieces, *, hide: bool) -> tuple[bytes, SseTap]:
    """What a client gets of these pieces."""
    tap = SseTap(hide_usage=hide, dialect="openai")
    out = b"".join([*(tap.feed(piece) for piece in pieces if piece), tap.finish()])
    return out, tap


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_split_at_every_byte(name: str, *, hide: bool) -> None:
    """Cut once at each byte, and into single bytes: identical bytes, identical findings."""
    stream = STREAMS[name]
    whole, tap = through([stream], hide=hide)
    if not hide or name in ("no usage", "no end", "unfinished", "usage with choices"):
        assert whole == stream
    else:
        ends = {"crlf": b"\r\n", "cr": b"\r"}
        hidden, finish, timed = (
            part.replace(b"\n", ends.get(name, b"\n")) for part in (USAGE, FINISH, TIMED)
        )
        if name == "comments":
            hidden = b": x\n" + hidden
        assert whole == stream.replace(hidden, b"").replace(finish, timed)
    assert tap.ended == (name not in ("no end", "unfinished"))
    assert not tap.failed
    cuts = [[stream[:at], stream[at:]] for at in range(len(stream) + 1)]
    cuts.append([stream[at : at + 1] for at in range(len(stream))])
    for pieces in cuts:
        out, again = through(pieces, hide=hide)
        assert out == whole
        assert (again.ended, again.events, again.notes) == (tap.ended, tap.events, tap.notes)


@given(st.lists(st.integers(0, len(STREAMS["plain"])), max_size=12), st.booleans())
def test_split_anywhere(cuts: list[int], hide: bool) -> None:
    """Several cuts at once."""
    stream = STREAMS["plain"]
    edges = [0, *sorted(cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert through(pieces, hide=hide)[0] == through([stream], hide=hide)[0]


def test_nothing_is_held_back_that_need_not_be() -> None:
    """Whole events go out at once; with usage asked for, so does every byte."""
    tap = SseTap(hide_usage=True, dialect="openai")
    assert tap.feed(WIDE) == WIDE
    assert tap.feed(WIDE + WIDE[:9]) == WIDE
    assert tap.between
    assert tap.feed(WIDE[9:]) == WIDE
    tap = SseTap(hide_usage=False, dialect="openai")
    assert tap.feed(WIDE[:9]) == WIDE[:9]
    assert not tap.between


def test_events_are_counted() -> None:
    """One a token, without comments, the end marker counted like an event at most."""
    _, tap = through([WIDE * 20, b": ping\n\n"], hide=True)
    assert tap.events == 20


@pytest.mark.parametrize(
    "frame",
    [
        b'data: {"error":{"message":"x"}}\n\n',
        b'error: {"message":"x"}\n\n',
        b'event: error\ndata: {"type":"error","error":{}}\n\n',
    ],
)
def test_an_error_inside_the_stream_is_noticed(frame: bytes) -> None:
    """Engines report failures after the head in these ways."""
    out, tap = through([WIDE, frame], hide=True)
    assert out == WIDE + frame
    assert tap.failed
    assert not tap.ended


@pytest.mark.parametrize(
    ("dialect", "end"),
    [
        ("anthropic", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("responses", b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":3,"output_tokens":4,"output_tokens_details":{"reasoning_tokens":2}}}}\n\n'),
        ("responses", b'event: response.failed\ndata: {"response":{}}\n\n'),
    ],
)  # fmt: skip
def test_each_dialect_has_its_end(dialect, end: bytes) -> None:
    """The dialect's own last event shows whether the answer is whole."""
    tap = SseTap(hide_usage=False, dialect=dialect)
    tap.feed(b"event: x\ndata: {}\n\n")
    assert not tap.ended
    tap.feed(end)
    assert tap.ended


def test_tokens_of_every_dialect() -> None:
    """Chat, responses, messages and embeddings each in their own shape."""
    chat = tokens_of_events([USAGE[6:-2]])
    assert chat == Tokens(prompt=11, completion=3, cached=5, per_s_milli=12_500)
    messages = tokens_of_events(
        [
            b'{"type":"message_start","message":{"usage":{"input_tokens":7,"cache_read_input_tokens":2,"output_tokens":0}}}',
            b'{"type":"message_delta","usage":{"output_tokens":9}}',
        ]
    )
    assert messages == Tokens(prompt=9, completion=9, cached=2)
    responses = tokens_of_events(
        [b'{"response":{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":1},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":2}}}}']
    )  # fmt: skip
    assert responses == Tokens(prompt=3, completion=4, cached=1, reasoning=2)
    vector = b'{"data":[' + b"0.1," * 50_000 + b'1],"usage":{"prompt_tokens":8,"total_tokens":8}}'
    assert tokens_of_answer(vector) == Tokens(prompt=8)
    assert tokens_of_answer(b'{"input_tokens": 12}') == Tokens(prompt=12)
    for nothing in (b"", b"[]", b"{}", b'{"usage":null}', b'{"usage":[]}', b"x" * 70_000):
        assert tokens_of_answer(nothing) is None
    assert tokens_of_answer(b"not gzip", b"gzip") is None


def test_hostile_numbers_do_not_hurt() -> None:
    """An engine's nonsense becomes zero."""
    assert (
        tokens_of_answer(
            b'{"usage":{"prompt_tokens":"5","completion_tokens":-3,"prompt_tokens_details":7},'
            b'"timings":{"predicted_per_second":null}}'
        )
        == Tokens()
    )


def test_timings_stay_when_the_usage_event_is_taken_out() -> None:
    """The finish gets them, once; a finish that has its own keeps those; none are invented."""
    out, _ = through([WIDE, FINISH, USAGE, DONE], hide=True)
    assert out == WIDE + TIMED + DONE
    own = FINISH.replace(b"}\n\n", b',"timings":{"predicted_n":1}}\n\n')
    assert through([own, USAGE, DONE], hide=True)[0] == own + DONE
    bare = USAGE.replace(b'"timings"', b'"others"')
    assert through([FINISH, bare, DONE], hide=True)[0] == FINISH + DONE


def test_each_answer_keeps_its_timings() -> None:
    """Two answers in one stream: each finish gets the timings of the usage event behind it."""
    second = USAGE.replace(b"12.5", b"7.5")
    tap = SseTap(hide_usage=True, dialect="openai", reports=2)
    out = b"".join(map(tap.feed, [FINISH, USAGE, WIDE, FINISH, second, DONE]))
    assert out == TIMED + WIDE + TIMED.replace(b"12.5", b"7.5") + DONE
    assert len(tap.notes) == 2
