"""The strict header reader: honest files are read exactly, hostile ones refused whatever they do."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.build.recipe import ChildLimits
from mmadmin.core.errors import InvalidModel, StepFailed
from mmadmin.core.formats.gguf import report as gguf_report
from mmadmin.core.formats.gguf.header import (
    CHUNK,
    GgufArray,
    read_header,
    read_stream,
    tensor_digests,
)
from tests.support.models import LFS_POINTER, TOKENS, make_model
from tests.support.tools import attempt


def test_a_real_header_reads_as_gguf_py_reads_it(tmp_path: Path) -> None:
    """Metadata, arrays, table and tensor bytes agree with the reference reader."""
    (path,) = make_model(tmp_path / "m.gguf", template="{{ messages }}")
    header = read_header(path)
    reference = GGUFReader(path)
    assert header.version == 3
    assert list(header.metadata) == [k for k in reference.fields if not k.startswith("GGUF.")]
    assert header.string("general.architecture") == "llama"
    assert header.integer("llama.block_count") == 2
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert (tokens.item_type, tokens.count) == ("string", len(TOKENS))
    types = header.metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, GgufArray)
    assert types.values == (1,) * len(TOKENS)
    assert [t.name for t in header.tensors] == [t.name for t in reference.tensors]
    for mine, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert mine.shape == tuple(int(n) for n in theirs.shape)
        assert (mine.offset, mine.size) == (theirs.data_offset, theirs.n_bytes)
    assert tensor_digests(path, header) == {
        t.name: hashlib.sha256(t.data.tobytes()).hexdigest() for t in reference.tensors
    }


def test_array_digests_tell_arrays_apart(tmp_path: Path) -> None:
    """One changed merge rule among many is another digest."""
    make_model(tmp_path / "a.gguf")
    make_model(tmp_path / "b.gguf")
    data = bytearray((tmp_path / "b.gguf").read_bytes())
    data[data.index(b"b c")] = ord("x")
    (tmp_path / "b.gguf").write_bytes(data)
    key = "tokenizer.ggml.merges"
    one, other = (read_header(tmp_path / name).metadata[key] for name in ("a.gguf", "b.gguf"))
    assert isinstance(one, GgufArray)
    assert isinstance(other, GgufArray)
    assert one.count == other.count
    assert one.sha256 != other.sha256


def text(value: str) -> bytes:
    """An encoded string."""
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(
    *,
    version: int = 3,
    tensors: int = 0,
    kvs: int = 1,
    body: bytes = text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    order: str = "<",
) -> bytes:
    """A file by hand; lengths may lie."""
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, kvs) + body


TENSOR = text("t") + struct.pack("<IQQIQ", 2, 8, 4, 0, 0)
ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")

HOSTILE = {
    "empty": b"",
    "lfs pointer": LFS_POINTER.encode(),
    "web page": b"<!DOCTYPE html><html></html>",
    "short magic": b"GG",
    "big-endian": gguf(order=">"),
    "version 1": gguf(version=1),
    "version 99": gguf(version=99),
    "string of 8 GiB": gguf(body=struct.pack("<Q", 8 << 30) + b"x" * 20),
    "value of 8 GiB": gguf(body=text("k") + struct.pack("<IQ", 8, 8 << 30)),
    "2^40 entries": gguf(kvs=1 << 40),
    "2^62 tensors": gguf(tensors=1 << 62),
    "array of 2^31": gguf(body=text("k") + struct.pack("<IIQ", 9, 4, 1 << 31)),
    "strings of 2^31": gguf(body=text("k") + struct.pack("<IIQ", 9, 8, 1 << 31)),
    "nested array": gguf(body=text("k") + struct.pack("<IIQ", 9, 9, 1)),
    "unknown value type": gguf(body=text("k") + struct.pack("<I", 77)),
    "key twice": gguf(kvs=2, body=ARCH + ARCH),
    "empty key": gguf(body=text("") + struct.pack("<I", 8) + text("x")),
    "no UTF-8": gguf(body=text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"),
    "alignment 0": gguf(body=text("general.alignment") + struct.pack("<II", 4, 0)),
    "alignment 24": gguf(body=text("general.alignment") + struct.pack("<II", 4, 24)),
    "alignment text": gguf(body=text("general.alignment") + struct.pack("<I", 8) + text("32")),
    "2^32-1 dimensions": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)
    ),
    "no dimensions": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IIQ", 0, 0, 0) + bytes(64)
    ),
    "shape overflows": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0)
    ),
    "zero length": gguf(tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 0, 4, 0, 0)),
    "unknown tensor type": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 8, 4, 4, 0) + bytes(256)
    ),
    "half a block": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 8, 4, 2, 0) + bytes(256)
    ),
    "beyond the end": gguf(tensors=1, body=ARCH + TENSOR),
    "offset beyond the end": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 8, 4, 0, 1 << 62) + bytes(256)
    ),
    "unaligned": gguf(
        tensors=1, body=ARCH + text("t") + struct.pack("<IQQIQ", 2, 8, 4, 0, 4) + bytes(512)
    ),
    "overlap": gguf(
        tensors=2,
        body=ARCH + TENSOR + text("u") + struct.pack("<IQQIQ", 2, 8, 4, 0, 32) + bytes(512),
    ),
    "tensor twice": gguf(
        tensors=2,
        body=ARCH + TENSOR + text("t") + struct.pack("<IQQIQ", 2, 8, 4, 0, 128) + bytes(512),
    ),
    "long tensor name": gguf(
        tensors=1, body=ARCH + text("t" * 64) + struct.pack("<IQQIQ", 2, 8, 4, 0, 0) + bytes(256)
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    """Each is `InvalidModel` that names the file, in no time and no memory."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(InvalidModel, match=r"hostile\.gguf is not a valid GGUF"):
        read_header(path)


def test_a_newer_tensor_type_is_not_called_damage() -> None:
    """A file for a newer engine may be sound: it is refused for its type, not as invalid."""
    tensor = text("t") + struct.pack("<IQQIQ", 2, 256, 4, 142, 0)
    data = gguf(tensors=1, body=ARCH + tensor + bytes(2048))
    with pytest.raises(InvalidModel, match=r"x holds the tensor t in the type 142") as caught:
        read_stream(io.BytesIO(data), len(data), "x")
    assert "not a valid" not in caught.value.message


def test_two_bit_blocks_are_read() -> None:
    """Q2_0, which the pinned engine makes and loads: 64 elements in 18 bytes."""
    tensor = text("t") + struct.pack("<IQQIQ", 2, 128, 4, 42, 0)
    data = gguf(tensors=1, body=ARCH + tensor + bytes(512))
    (found,) = read_stream(io.BytesIO(data), len(data), "x").tensors
    assert (found.type, found.size) == ("Q2_0", 8 * 18)


def test_the_smallest_honest_files_pass() -> None:
    """The parts that the hostile ones are made of are right by themselves."""
    for data in (gguf(), gguf(version=2), gguf(tensors=1, body=ARCH + TENSOR + bytes(256))):
        assert read_stream(io.BytesIO(data), len(data), "x").string("general.architecture")


def test_a_large_vocabulary_is_digested_as_it_lies_in_the_file() -> None:
    """Read in pieces: strings across their seams, and one that is longer than a piece."""
    words = [f"word {n} " * (n % 9) for n in range(60_000)] + ["y" * (2 * CHUNK), "", "z"]
    encoded = b"".join(text(word) for word in words)
    head = text("k") + struct.pack("<IIQ", 9, 8, len(words))
    data = gguf(kvs=2, body=head + encoded + ARCH)
    header = read_stream(io.BytesIO(data), len(data), "x")
    assert len(encoded) > 4 * CHUNK
    assert header.metadata["k"] == GgufArray(
        "string", len(words), hashlib.sha256(encoded).hexdigest()
    )
    assert header.string("general.architecture") == "llama"


def test_pointer_and_web_page_are_called_by_name(tmp_path: Path) -> None:
    """What really is in the file is said, so that the remedy is clear."""
    for case, words in (
        ("lfs pointer", "Git-LFS pointer"),
        ("web page", "web page"),
        ("big-endian", "big-endian"),
    ):
        path = tmp_path / "x.gguf"
        path.write_bytes(HOSTILE[case])
        with pytest.raises(InvalidModel, match=words):
            read_header(path)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 6))
def test_damaged_headers_never_crash_the_reader(
    seed: int, flips: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes are changed or cut: a header or `InvalidModel`, nothing else."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "seed.gguf"
    if not path.exists():
        make_model(path)
    chance = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(flips):
        data[chance.randrange(1200)] = chance.randrange(256)
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    try:
        header = read_stream(io.BytesIO(bytes(data)), len(data), "damaged")
    except InvalidModel:
        return
    for tensor in header.tensors:
        assert tensor.offset + tensor.size <= len(data)


def test_the_child_survives_everything_that_a_file_can_do(tmp_path: Path) -> None:
    """The report's answer for a bad file is an error in words, never a traceback."""
    for case, data in HOSTILE.items():
        path = tmp_path / "hostile.gguf"
        path.write_bytes(data)
        answer = gguf_report.answer({"files": [str(path)]})
        assert set(answer) == {"error"}, case
    assert set(gguf_report.answer({"files": ["/nonexistent/x.gguf"]})) == {"error"}
    assert set(gguf_report.answer({})) == {"error"}


def test_the_child_is_limited_in_time_and_memory(tmp_path: Path) -> None:
    """A child that eats memory or hangs is ended and that is said."""
    tools = attempt(tmp_path).tools
    limits = ChildLimits(time_s=2, memory_bytes=256 << 20)
    for module in ("tests.support.greedy", "tests.support.endless"):
        with pytest.raises(StepFailed):
            tools.python(module, None, limits=limits)
    assert sys.modules.get("tests.support.greedy") is None
