"""What a merge must come out as, told from its shards before the tool has written it.

A merged file is the first shard's metadata, a table of all shards' tensors, and their bytes, each
padded with zeros. So header, size and digest are known beforehand, and the digest, which takes
longer than the merge itself, is computed on another core while the tool runs.

It is a forecast, not a proof: `mmadmin.core.formats.gguf.merged` believes it only once the finished
file has this very size and header, zeros for padding and, byte for byte, the shards' tensors. All
of that is checked after the tool has ended: a byte that was right while it ran can change before it
ends, and nothing tells (its own header is written last, over zeros). Where the layout cannot be
computed there is no forecast, and the file is hashed when it is there.

Layout: `gguf_merge` of llama.cpp's gguf-split and `gguf_write_out` of ggml's gguf.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mmadmin.core.errors import Cancelled, InvalidModel
from mmadmin.core.formats.gguf.header import DEFAULT_ALIGNMENT, MAGIC, TYPE_NUMBERS, Tensor
from mmadmin.core.formats.gguf.shards import COUNT, Shard

WRITTEN_VERSION = 3
LARGEST_HEADER = 256 << 20
"""Bytes; honest ones are a tenth of it. It is held in memory."""
U16 = 2
PIECE = 1 << 20
COUNTS = "<IQQ"
"""Version, tensors, metadata entries."""


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's bytes: where the merged file has them, and where they come from."""

    tensor: str
    at: int
    size: int
    source: Path
    offset: int

    @property
    def end(self) -> int:
        """The byte after its last, in the merged file."""
        return self.at + self.size


@dataclass(frozen=True, slots=True)
class ExpectedMerge:
    """The merged file, all but its tensors' bytes."""

    header: bytes
    spans: tuple[Span, ...]
    """In the file's order."""

    @property
    def size(self) -> int:
        """Of the whole file, bytes."""
        end = self.spans[-1].end if self.spans else len(self.header)
        return end + padding(end)

    @property
    def gaps(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of the zeros between the tensors and after them."""
        at = len(self.header)
        for span in self.spans:
            yield at, span.at
            at = span.end
        yield at, self.size


def padding(size: int) -> int:
    """Zeros after this many bytes; the tool pads by 32 whatever the model says."""
    return -size % DEFAULT_ALIGNMENT


def expect_merge(shards: Sequence[Shard]) -> ExpectedMerge | None:
    """The merge of a checked set; None where the tool's layout is not known.

    The tool keeps the first shard's metadata as it is, but for the count of shards, which goes to
    the end as 0. Raises `OSError`.
    """
    first = shards[0]
    if first.header.header_size > LARGEST_HEADER or first.header.alignment != DEFAULT_ALIGNMENT:
        return None
    with first.path.open("rb") as stream:
        raw = stream.read(first.header.header_size)
    entries = [raw[begin:end] for key, (begin, end) in first.header.places.items() if key != COUNT]
    entries.append(_text(COUNT) + struct.pack("<IH", U16, 0))
    pairs = [(shard, tensor) for shard in shards for tensor in shard.header.tensors]
    table, at = [], 0
    for _, tensor in pairs:
        table.append(_entry(tensor, at))
        at += tensor.size + padding(tensor.size)
    counts = struct.pack(COUNTS, WRITTEN_VERSION, len(pairs), len(entries))
    header = b"".join([MAGIC, counts, *entries, *table])
    header += bytes(padding(len(header)))
    return ExpectedMerge(header, tuple(_spans(pairs, len(header))))


def _spans(pairs: Sequence[tuple[Shard, Tensor]], at: int) -> Iterator[Span]:
    for shard, tensor in pairs:
        yield Span(tensor.name, at, tensor.size, shard.path, tensor.offset)
        at += tensor.size + padding(tensor.size)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(tensor: Tensor, at: int) -> bytes:
    """A line of the tensor table; dimensions of 1 at the end are not written, but for the first."""
    shape = list(tensor.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    numbers = (len(shape), *shape, TYPE_NUMBERS[tensor.type], at)
    return _text(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", *numbers)


class DigestAhead:
    """Computes a expected file's sha256 in a thread of its own, between `with` and its end.

    Leaving the `with` stops it within moments. It holds one buffer of memory.
    """

    def __init__(self, expected: ExpectedMerge) -> None:
        self.expected = expected
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._digest: Future[str] | None = None

    def __enter__(self) -> Self:
        self._digest = self._pool.submit(self._work)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()

    def result(self) -> str:
        """Wait for it; raises `OSError` and `InvalidModel` as reading the shards does."""
        if self._digest is None:
            raise AssertionError("outside the with")
        return self._digest.result()

    def _work(self) -> str:
        found = hashlib.sha256(self.expected.header)
        for piece in self._pieces():
            if self._stop.is_set():
                raise Cancelled("the digest is no longer waited for")
            found.update(piece)
        return found.hexdigest()

    def _pieces(self) -> Iterator[bytes | memoryview]:
        """All bytes after the header."""
        view = memoryview(bytearray(PIECE))
        at = len(self.expected.header)
        for span in self.expected.spans:
            yield bytes(span.at - at)
            with span.source.open("rb", buffering=0) as stream:
                stream.seek(span.offset)
                left = span.size
                while left:
                    count = stream.readinto(view[: min(PIECE, left)])
                    if not count:
                        raise InvalidModel(
                            f"{span.source.name} ends within {span.tensor}",
                            remedy="fetch this shard again",
                        )
                    yield view[:count]
                    left -= count
            at = span.end
        yield bytes(self.expected.size - at)
