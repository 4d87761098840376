"""The header of a safetensors file, checked before any of it is believed.

For untrusted files. The length of the header is checked against the file and the format's limit
before it is read; every tensor must have a known type, a size that follows from its shape, and its
own bytes: no gap, no overlap, nothing behind the last one. Anything else is `InvalidModel`.

Format: the `safetensors` library (`src/tensor.rs`), whose limits these are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mmadmin.core.errors import InvalidModel

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Bytes: the library's own limit."""
MAX_DIMS = 64
MAX_SIDE = 1 << 53
CHUNK = 1 << 20
METADATA = "__metadata__"
BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of an element by type."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's form and place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Everything before the tensors' bytes."""

    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    """In the order of their bytes."""
    file_size: int


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a file on this disk. Raises `InvalidModel`, `OSError`."""
    with path.open("rb") as stream:
        return read_stream(stream, os.fstat(stream.fileno()).st_size, path.name)


def read_stream(stream: BinaryIO, file_size: int, name: str) -> SafetensorsHeader:
    """The header of a file of `file_size` bytes; reads nothing behind it. Raises `InvalidModel`."""
    first = stream.read(LENGTH_BYTES)
    if len(first) < LENGTH_BYTES:
        _refuse(name, f"it has only {len(first)} bytes")
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER, file_size - LENGTH_BYTES):
        _refuse(name, f"it announces a header of {length:,} bytes in a file of {file_size:,}")
    text = stream.read(length)
    if len(text) < length:
        _refuse(name, f"its header ends after {len(text):,} of {length:,} bytes")
    table = _parse(text, name)
    metadata = _metadata(table.pop(METADATA, {}), name)
    start = LENGTH_BYTES + length
    tensors = [_tensor(key, value, start, name) for key, value in table.items()]
    tensors.sort(key=lambda one: (one.offset, one.size))
    _check_places(tensors, start, file_size, name)
    return SafetensorsHeader(metadata, tuple(tensors), file_size)


def tensor_digests(
    path: Path, header: SafetensorsHeader, names: Collection[str] | None = None
) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, type and shape; None = of all tensors."""
    found: dict[str, str] = {}
    with path.open("rb") as stream:
        for tensor in header.tensors:
            if names is not None and tensor.name not in names:
                continue
            total = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
            stream.seek(tensor.offset)
            left = tensor.size
            while left:
                piece = stream.read(min(left, CHUNK))
                if not piece:
                    _refuse(path.name, f"it ends inside {tensor.name}")
                total.update(piece)
                left -= len(piece)
            found[tensor.name] = total.hexdigest()
    return found


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidModel(
        f"{name} is not a valid safetensors file: {what}", remedy="fetch it again", file=name
    )


def _parse(text: bytes, name: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key appears twice")
        return table

    if not text.startswith(b"{"):
        _refuse(name, "its header is not a table")
    try:
        table = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        _refuse(name, f"its header cannot be parsed ({error})"[:200])
    assert isinstance(table, dict)  # noqa: S101 (it begins with a brace)
    return table


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _refuse(name, f"{METADATA} is not a table of texts")
    return value


def _tensor(key: str, value: Any, start: int, name: str) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse(name, f"the entry of {key[:80]!r} has other fields")
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(name, f"{key[:80]!r} has the unknown type {str(dtype)[:40]!r}")
    if not _whole(shape) or len(shape) > MAX_DIMS:
        _refuse(name, f"{key[:80]!r} has no valid shape")
    if not _whole(span) or len(span) != 2 or span[0] > span[1]:  # noqa: PLR2004 (begin, end)
        _refuse(name, f"{key[:80]!r} has no valid place")
    size = span[1] - span[0]
    if size * 8 != math.prod(shape) * BITS[dtype]:
        _refuse(name, f"{key[:80]!r} has {size:,} bytes, its shape and type want others")
    return Tensor(key, dtype, tuple(shape), start + span[0], size)


def _whole(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_SIDE for n in value
    )


def _check_places(tensors: list[Tensor], start: int, file_size: int, name: str) -> None:
    at = start
    for tensor in tensors:
        if tensor.offset != at:
            _refuse(name, f"the bytes of {tensor.name[:80]!r} leave a gap or overlap others")
        at += tensor.size
    if at != file_size:
        _refuse(name, f"its tensors end at byte {at:,}, the file at {file_size:,}")
