"""Is this one file really the merge of those shards? Every key, array and tensor byte says so.

The merge tool checks none of its reads: a truncated shard merges with exit code 0 and the right
size. So the merged file is read once, when the tool has ended, and each tensor compared with its
shard byte for byte. Its digest was expected from the shards while the tool ran
(`mmadmin.core.formats.gguf.expected_merge`), and is taken when size, header and padding are as
expected, too; otherwise the whole file is hashed on the way, in a second thread.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NoReturn

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.gguf.expected_merge import DigestAhead, ExpectedMerge, Span
from mmadmin.core.formats.gguf.header import GgufHeader, Tensor, read_header
from mmadmin.core.formats.gguf.shards import SPLIT_KEYS, Shard

CHUNK = 1 << 20
COMPARED = 256 << 10
"""Bytes at a time of two files that are compared: both pieces stay in a core's own cache."""
STRETCH = 32 << 20
"""Bytes that one thread compares before it takes the next."""
COMPARERS = 2
REMEDY = "the merge went wrong: check the disk and memory of this host, then build again"

OnBytes = Callable[[int, int], None]
"""(bytes done, bytes in all); may raise to stop."""


def check_merged(
    merged: Path, shards: Sequence[Shard], on_bytes: OnBytes, ahead: DigestAhead | None = None
) -> str:
    """The sha256 of `merged`, once it is proven to be the merge of `shards`.

    `ahead` computes the digest that the file has if all is well. Raises `InvalidModel` naming
    what differs.
    """
    header = read_header(merged)
    _check_metadata(header, shards)
    pairs = _check_table(header, shards)
    if ahead is not None and _is_as_expected(merged, ahead.expected):
        _compare(merged, ahead.expected, on_bytes)
        return ahead.result()
    return _check_bytes(merged, header, pairs, on_bytes)


def _refuse(what: str) -> NoReturn:
    raise InvalidModel(f"the merged file is not its shards: {what}", remedy=REMEDY)


def _check_metadata(header: GgufHeader, shards: Sequence[Shard]) -> None:
    first = shards[0].header
    wanted = {key: value for key, value in first.metadata.items() if key not in SPLIT_KEYS}
    found = {key: value for key, value in header.metadata.items() if key not in SPLIT_KEYS}
    if lost := sorted(wanted.keys() - found.keys()):
        _refuse(f"it lacks {', '.join(lost)}")
    if extra := sorted(found.keys() - wanted.keys()):
        _refuse(f"it has {', '.join(extra)}, which no shard has")
    for key, value in wanted.items():
        if header.types[key] != first.types[key] or repr(found[key]) != repr(value):
            _refuse(f"its {key} differs")
    if header.integer("split.count") not in (None, 0):
        _refuse("it still claims to be one of several files")


def _check_table(header: GgufHeader, shards: Sequence[Shard]) -> list[tuple[Tensor, Shard, Tensor]]:
    """Merged tensor ↔ shard's tensor, in the merged file's order of bytes."""
    where = {t.name: (shard, t) for shard in shards for t in shard.header.tensors}
    if lost := sorted(where.keys() - header.by_name.keys()):
        _refuse(f"it lacks {len(lost)} tensors, among them {lost[0]}")
    if extra := sorted(header.by_name.keys() - where.keys()):
        _refuse(f"it has {len(extra)} tensors too many, among them {extra[0]}")
    pairs = []
    for tensor in sorted(header.tensors, key=lambda one: one.offset):
        shard, original = where[tensor.name]
        if (tensor.shape, tensor.type) != (original.shape, original.type):
            _refuse(f"its tensor {tensor.name} has another shape or type than in {shard.path.name}")
        pairs.append((tensor, shard, original))
    return pairs


def _is_as_expected(merged: Path, expected: ExpectedMerge) -> bool:
    """True when all but the tensors' bytes is: size, header, padding."""
    with merged.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size != expected.size:
            return False
        if stream.read(len(expected.header)) != expected.header:
            return False
        for begin, end in expected.gaps:
            stream.seek(begin)
            if stream.read(end - begin) != bytes(end - begin):
                return False
    return True


def _compare(merged: Path, expected: ExpectedMerge, on_bytes: OnBytes) -> None:
    """Every tensor's bytes beside its shard's, by several threads."""
    stretches = list(_stretches(expected.spans))
    done = 0
    with ThreadPoolExecutor(COMPARERS, thread_name_prefix="compare") as pool:
        try:
            for size in pool.map(lambda stretch: _compare_stretch(merged, stretch), stretches):
                done += size
                on_bytes(done, expected.size)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _stretches(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        for skip in range(0, span.size, STRETCH):
            size = min(STRETCH, span.size - skip)
            yield replace(span, at=span.at + skip, offset=span.offset + skip, size=size)


def _compare_stretch(merged: Path, span: Span) -> int:
    """Its size, when both files have the same bytes there."""
    ours, theirs = bytearray(COMPARED), bytearray(COMPARED)
    with merged.open("rb", buffering=0) as one, span.source.open("rb", buffering=0) as other:
        one.seek(span.at)
        other.seek(span.offset)
        left = span.size
        while left:
            if left < len(ours):
                del ours[left:], theirs[left:]
            found, wanted = one.readinto(ours), other.readinto(theirs)
            if not found == wanted == len(ours) or ours != theirs:
                _refuse(f"its tensor {span.tensor} differs from {span.source.name}")
            left -= found
    return span.size


class _Hasher:
    """sha256 in a second thread, with a bounded queue."""

    def __init__(self) -> None:
        self._pieces: queue.Queue[bytes] = queue.Queue(maxsize=8)
        self._digest = hashlib.sha256()
        self._thread = threading.Thread(target=self._work, name="sha256", daemon=True)
        self._thread.start()

    def update(self, piece: bytes) -> None:
        if piece:
            self._pieces.put(piece)

    def close(self) -> str:
        self._pieces.put(b"")
        self._thread.join()
        return self._digest.hexdigest()

    def _work(self) -> None:
        while piece := self._pieces.get():
            self._digest.update(piece)


def _check_bytes(
    merged: Path,
    header: GgufHeader,
    pairs: Sequence[tuple[Tensor, Shard, Tensor]],
    on_bytes: OnBytes,
) -> str:
    hasher = _Hasher()
    at = 0
    try:
        with ExitStack() as stack:
            stream = stack.enter_context(merged.open("rb"))
            paths = {shard.path for _tensor, shard, _original in pairs}
            files = {path: stack.enter_context(path.open("rb")) for path in paths}
            for tensor, shard, original in pairs:
                at += _hash(stream, hasher, tensor.offset - at)  # the gap before it
                source = files[shard.path]
                source.seek(original.offset)
                left = tensor.size
                while left:
                    piece = stream.read(min(CHUNK, left))
                    if not piece or piece != source.read(len(piece)):
                        _refuse(f"its tensor {tensor.name} differs from {shard.path.name}")
                    hasher.update(piece)
                    left -= len(piece)
                    at += len(piece)
                    on_bytes(at, header.file_size)
            _hash(stream, hasher, header.file_size - at)
    finally:
        digest = hasher.close()
    return digest


def _hash(stream: BinaryIO, hasher: _Hasher, size: int) -> int:
    left = size
    while left > 0:
        piece = stream.read(min(CHUNK, left))
        if not piece:
            _refuse("it ends early")
        hasher.update(piece)
        left -= len(piece)
    return size
