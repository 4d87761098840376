"""Server-sent events, read in passing: a copy is parsed, the bytes go on as they came.

`SseTap.feed` takes whatever the engine wrote, cut anywhere, and returns what the client gets.
When the client did not ask for usage, the one chunk that the gate asked for (no choices, but
usage) is taken out; for that an unfinished frame is held back until its end is there. Some engines
put `timings` into that chunk when there is one, else into the chunk with the finish reason: so
that one is held back as well, and gets the `timings` of the chunk that is taken out. In every
other case nothing is held back. The bytes that come out are the same for every way of cutting.
"""

from __future__ import annotations

import re

from mmadmin.gate.refusal import Dialect

_FRAME_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
"""A line end and an empty line. `\\r` before `\\n` at the very end waits for the next byte."""
_DATA = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)
_FINISH = b'"finish_reason":"'
_TIMINGS = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')
_NO_USAGE = re.compile(rb'"usage":\s*null')
_COMMON = (b"data:", b"event:")
_CR = 13
ENDS: dict[Dialect, tuple[bytes, ...]] = {
    "openai": (b"data: [DONE]", b"data:[DONE]"),
    "responses": (
        b"event: response.completed",
        b"event: response.incomplete",
        b"event: response.failed",
        b"data: [DONE]",
    ),
    "anthropic": (b"event: message_stop",),
}
"""How the last frame of a whole answer begins."""
_MARKS: dict[Dialect, tuple[bytes, ...]] = {
    "openai": (b"[DONE]",),
    "responses": (b"response.completed", b"response.incomplete", b"response.failed", b"[DONE]"),
    "anthropic": (b"message_stop",),
}
"""What every such frame contains: a chunk without it need not be taken apart."""
HELD_LIMIT_BYTES = 4 * 1024 * 1024
"""A frame longer than this passes without being looked at."""


class SseTap:
    """Watches one stream: usage, number of events, the end marker, errors."""

    __slots__ = (
        "_ends",
        "_finish",
        "_hide",
        "_kept",
        "_looks",
        "_marks",
        "_tail",
        "ended",
        "events",
        "failed",
        "notes",
        "reports",
    )

    def __init__(self, *, hide_usage: bool, dialect: Dialect, reports: int = 1) -> None:
        self._hide = hide_usage
        self._kept = max(reports, 2)
        """Usage reports that are kept: the first and the last say everything about one answer."""
        self.reports = reports
        """How many answers report their own usage; 1 = one answer, or one report of all."""
        self._finish = b""
        """The frame with the finish reason, until the next one has come."""
        self._ends = ENDS[dialect]
        self._marks = _MARKS[dialect]
        self._tail = b""
        self.ended = False
        """The engine sent its end marker: the answer is whole."""
        self.failed = False
        """The engine reported an error inside the stream."""
        self.events = 0
        """Data events seen so far: about one a token."""
        self.notes: list[bytes] = []
        """Data of the events that carry usage, the newest last."""

    @property
    def between(self) -> bool:
        """Whether the client is between two events, so that a comment may be put in."""
        return not self._tail or self._hide

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; returns what goes to the client now."""
        if (
            not self._tail
            and chunk.endswith(b"\n\n")
            and b'"usage":' not in chunk
            and b'"error"' not in chunk
            and b"\r" not in chunk
            and chunk.startswith(_COMMON)
            and b"\nerror:" not in chunk
            and not self._finish
            and not (self._hide and _FINISH in chunk)
        ):
            for mark in self._marks:
                if mark in chunk:
                    break
            else:
                self.events += chunk.count(b"\n\n")
                return chunk
        return self._feed_slowly(chunk)

    def _feed_slowly(self, chunk: bytes) -> bytes:
        buffer = self._tail + chunk
        out: list[bytes] = []
        start = 0
        while (match := _FRAME_END.search(buffer, start)) is not None:
            end = match.end()
            if end == len(buffer) and buffer[end - 1] == _CR:
                break
            frame = buffer[start:end]
            shown = self._look(frame)
            if self._hide:
                out.append(self._pass_on(frame, shown=shown))
            start = end
        self._tail = buffer[start:]
        if not self._hide:
            return chunk
        if len(self._tail) > HELD_LIMIT_BYTES:
            out += (self._finish, self._tail)
            self._finish = self._tail = b""
        return b"".join(out)

    def _pass_on(self, frame: bytes, *, shown: bool) -> bytes:
        """What the client gets now, of this frame and of the one that was held back."""
        held, self._finish = self._finish, b""
        if not shown:
            return _with_timings(held, frame) if held else b""
        if _FINISH in frame:
            self._finish = frame
            return held
        return held + frame

    def finish(self) -> bytes:
        """The engine closed: whatever was held back."""
        tail, self._tail = self._tail, b""
        held, self._finish = self._finish, b""
        shown = bool(tail) and self._look(tail)
        if not self._hide:
            return b""
        return held + tail if shown else held

    def _look(self, frame: bytes) -> bool:
        """Take note of one frame; False = the client does not get it."""
        if frame.startswith(self._ends):
            self.ended = True
        data = _DATA.search(frame)
        if data is None:
            if frame.startswith(b"error:"):
                self.failed = True
            return True
        self.events += 1
        if b'"error"' in frame and (
            data[1].startswith(b'{"error"') or frame.startswith(b"event: error")
        ):
            self.failed = True
        if b'"usage":' in frame and not _NO_USAGE.search(frame):
            self.notes.append(data[1])
            if len(self.notes) > self._kept:
                del self.notes[1]
            if self._hide and _is_usage_only(data[1]):
                self.events -= 1
                return False
        return True


def _is_usage_only(data: bytes) -> bool:
    """Whether a chunk exists only because usage was asked for."""
    return re.search(rb'"choices"\s*:\s*\[\s*\]', data) is not None


def _with_timings(frame: bytes, hidden: bytes) -> bytes:
    """The frame with the finish reason, with the `timings` of the frame that is taken out."""
    found = _TIMINGS.search(hidden)
    at = len(frame.rstrip(b"\r\n")) - 1
    if found is None or b'"timings"' in frame or frame[at : at + 1] != b"}":
        return frame
    return frame[:at] + b',"timings":' + found[1] + frame[at:]
