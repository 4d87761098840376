"""The reader of safetensors headers: honest files are read exactly, hostile ones are refused."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.header import (
    BITS,
    MAX_HEADER,
    SafetensorsHeader,
    read_header,
    read_stream,
    tensor_digests,
)
from tests.support.checkpoints import bf16, safetensors


def read(data: bytes, size: int | None = None) -> SafetensorsHeader:
    """A file in memory."""
    return read_stream(io.BytesIO(data), len(data) if size is None else size, "m.safetensors")


def raw(header: object, body: bytes = b"") -> bytes:
    """A file with any JSON for a header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ENTRIES = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(sorted(name for name, bits in BITS.items() if bits % 8 == 0)),
        st.lists(st.integers(0, 5), max_size=4),
    ),
    max_size=6,
)


@given(entries=ENTRIES, pad=st.integers(0, 9))
def test_what_was_written_is_read(entries: dict[str, tuple[str, list[int]]], pad: int) -> None:
    """Names, types, shapes and places of any honest file come back."""
    made, at = {}, 0
    for name, (dtype, shape) in entries.items():
        size = BITS[dtype] // 8
        for side in shape:
            size *= side
        made[name] = (dtype, shape, bytes(at + i & 255 for i in range(size)))
        at += size
    data = safetensors(made, {"format": "pt"}, pad=pad)
    found = read(data)
    assert found.metadata == {"format": "pt"}
    assert {one.name: (one.dtype, list(one.shape)) for one in found.tensors} == entries
    for one in found.tensors:
        assert data[one.offset : one.offset + one.size] == made[one.name][2]


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_sound(data: Any) -> None:
    """Whatever byte is changed, and wherever the file is cut: `InvalidModel`, or a sound header."""
    whole = bytearray(safetensors({"a": bf16(3, 4), "b": bf16(5), "c": ("I64", [2], bytes(16))}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = read(cut)
    except InvalidModel:
        return
    assert sum(one.size for one in found.tensors) <= len(cut)
    assert all(0 <= one.offset <= len(cut) - one.size for one in found.tensors)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """Random bytes are never our bug."""
    with pytest.raises(InvalidModel):
        read(noise + b"x")


class Counted(io.BytesIO):
    """Counts what is asked of it."""

    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        """As asked."""
        self.largest = max(self.largest, size or 0)
        return super().read(size)


@pytest.mark.parametrize("announced", [1 << 63, MAX_HEADER + 1, 1 << 40, 2000])
def test_a_hostile_length_is_refused_before_it_is_read(announced: int) -> None:
    """A header that is longer than the file or the limit costs eight bytes."""
    stream = Counted(struct.pack("<Q", announced) + b"{}")
    with pytest.raises(InvalidModel, match="announces a header"):
        read_stream(stream, 1000, "m.safetensors")
    assert stream.largest == 8


def test_the_limit_holds_for_large_files_too() -> None:
    """A file that could hold such a header is refused by the format's own limit."""
    stream = Counted(struct.pack("<Q", MAX_HEADER + 1))
    with pytest.raises(InvalidModel, match="announces a header"):
        read_stream(stream, 1 << 40, "m.safetensors")


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "body", "what"),
    [
        (b'{"a":1', b"", "cannot be parsed"),
        (b"[" * 5000, b"", "not a table"),
        (b'{"a":' + b"[" * 100_000, b"", "cannot be parsed"),
        (b"\xff\xfe{}", b"", "not a table"),
        (b'{"a":{"dtype":"\xff"}}', b"", "cannot be parsed"),
        ({"a": ENTRY}, b"123", "end at byte"),
        ({"a": ENTRY}, b"12345", "end at byte"),
        ({"a": {**ENTRY, "data_offsets": [2, 6]}}, b"123456", "gap or overlap"),
        ({"a": ENTRY, "b": ENTRY}, b"12345678", "gap or overlap"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"1234", "no valid place"),
        ({"a": {**ENTRY, "data_offsets": [0, 1 << 80]}}, b"1234", "no valid place"),
        ({"a": {**ENTRY, "data_offsets": [0, True]}}, b"1234", "no valid place"),
        ({"a": {**ENTRY, "shape": [3]}}, b"1234", "want others"),
        ({"a": {**ENTRY, "shape": [-2]}}, b"1234", "no valid shape"),
        ({"a": {**ENTRY, "shape": [2.0]}}, b"1234", "no valid shape"),
        ({"a": {**ENTRY, "shape": [1 << 53] * 65}}, b"1234", "no valid shape"),
        ({"a": {**ENTRY, "dtype": "Q4_K"}}, b"1234", "unknown type"),
        ({"a": {**ENTRY, "dtype": ["BF16"]}}, b"1234", "unknown type"),
        ({"a": {**ENTRY, "code": "x"}}, b"1234", "other fields"),
        ({"a": 7}, b"", "other fields"),
        ({"__metadata__": {"format": 1}}, b"", "__metadata__"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "appears twice"),
        (b'{"a":' + b"9" * 10_000 + b"}", b"", "cannot be parsed"),
    ],
)
def test_refuses(header: object, body: bytes, what: str) -> None:
    """Each kind of wrong header is named."""
    with pytest.raises(InvalidModel, match=what):
        read(raw(header, body))


def test_types_below_a_byte() -> None:
    """Four bits an element: two of them share a byte."""
    found = read(raw({"a": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]}}, b"123"))
    assert found.tensors[0].size == 3


def test_digests_cover_bytes_type_and_shape(tmp_path: Path) -> None:
    """The same bytes with another shape are another tensor."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors({"a": bf16(2, 3), "b": bf16(3, 2), "c": bf16(2, 3)}))
    digests = tensor_digests(path, read_header(path))
    assert digests["a"] == digests["c"] != digests["b"]
    expected = hashlib.sha256(b"BF16[2, 3]" + bf16(2, 3)[2]).hexdigest()
    assert digests["a"] == expected
