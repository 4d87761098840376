"""ExpectedMerge merges: what the real tool writes, told from the shards before it writes it."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.errors import Cancelled, InvalidModel
from mmadmin.core.formats.gguf import expected_merge as module
from mmadmin.core.formats.gguf.expected_merge import DigestAhead, ExpectedMerge, Span, expect_merge
from mmadmin.core.formats.gguf.header import TENSOR_TYPES, TYPE_NUMBERS, read_header
from mmadmin.core.formats.gguf.merged import check_merged
from mmadmin.core.formats.gguf.shards import read_set
from tests.support.engine import EngineStore
from tests.support.models import cut, make_shards

T = GGUFValueType
RANGES = {
    T.UINT8: (0, 2**8 - 1), T.INT8: (-(2**7), 2**7 - 1),
    T.UINT16: (0, 2**16 - 1), T.INT16: (-(2**15), 2**15 - 1),
    T.UINT32: (0, 2**32 - 1), T.INT32: (-(2**31), 2**31 - 1),
    T.UINT64: (0, 2**64 - 1), T.INT64: (-(2**63), 2**63 - 1),
}  # fmt: skip
NUMBERS: dict[GGUFValueType, st.SearchStrategy[Any]] = {
    **{kind: st.integers(*bounds) for kind, bounds in RANGES.items()},
    T.FLOAT32: st.floats(width=32),
    T.FLOAT64: st.floats(),
    T.BOOL: st.booleans(),
}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
VALUES = {**NUMBERS, T.STRING: TEXT}
TYPES = ["F32", "F16", "I8", "Q8_0", "Q4_1", "Q6_K", "IQ4_NL"]


@st.composite
def entries(draw: st.DrawFn) -> tuple[GGUFValueType, GGUFValueType | None, Any]:
    """A metadata value: type, item type of an array, value."""
    kind = draw(st.sampled_from(list(VALUES)))
    if draw(st.booleans()):
        return kind, None, draw(VALUES[kind])
    return T.ARRAY, kind, draw(st.lists(VALUES[kind], min_size=1, max_size=9))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    """A tensor's type and shape, rows first as ggml has it; dimensions of 1 anywhere."""
    kind = draw(st.sampled_from(TYPES))
    _, block, _ = TENSOR_TYPES[TYPE_NUMBERS[kind]]
    row = draw(st.integers(1, 9 if block == 1 else 2)) * block
    return kind, (row, *draw(st.lists(st.integers(1, 5), max_size=3)))


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A split model."""
    return {
        "entries": draw(st.dictionaries(TEXT.filter(bool), entries(), max_size=6)),
        "tensors": draw(st.lists(tensors(), min_size=2, max_size=7)),
        "split": draw(st.integers(1, 6)),
        "small_first": draw(st.booleans()),
        "alignment": draw(st.sampled_from([0, 0, 0, 32])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def write(folder: Path, model: dict[str, Any]) -> list[Path]:
    """The model's shards; a single one counts as a whole model and is none."""
    writer = GGUFWriter(
        folder / "m.gguf",
        "llama",
        split_max_tensors=model["split"],
        small_first_shard=model["small_first"],
    )
    if model["alignment"]:
        writer.add_custom_alignment(model["alignment"])
    for key, (kind, item, value) in model["entries"].items():
        writer.add_key_value(f"x.{key}", value, kind, sub_type=item)
    random = np.random.default_rng(model["seed"])
    for number, (kind, shape) in enumerate(model["tensors"]):
        dtype = GGMLQuantizationType[kind]
        _, block, block_bytes = TENSOR_TYPES[TYPE_NUMBERS[kind]]
        row_bytes = shape[0] // block * block_bytes
        data = random.integers(0, 256, (*reversed(shape[1:]), row_bytes), dtype=np.uint8)
        writer.add_tensor(f"t.{number}", data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*-of-*.gguf"))


def merge(tool: Path, first: Path, out: Path) -> Path:
    """What the real tool makes of it."""
    subprocess.run([tool, "--merge", first, out], check=True, capture_output=True)
    return out


@pytest.mark.engine
@settings(max_examples=40, deadline=None)
@given(model=models())
def test_the_real_tool_writes_what_was_expected(
    model: dict[str, Any], engine_store: EngineStore
) -> None:
    """Header, size and digest, for metadata of every type, odd sizes and shapes, any split."""
    tool = engine_store.path("tools") / "bin/llama-gguf-split"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write(folder, model)
        if len(paths) < 2:
            return  # everything fits into one file: no set
        expected = expect_merge(read_set(paths[0]))
        assert expected is not None
        with DigestAhead(expected) as ahead:
            data = merge(tool, paths[0], folder / "out.gguf").read_bytes()
            assert data[: len(expected.header)] == expected.header
            assert len(data) == expected.size
            assert ahead.result() == hashlib.sha256(data).hexdigest()


@pytest.mark.engine
def test_a_header_that_the_tool_writes_anew_is_hashed_afterwards(
    tmp_path: Path, engine_store: EngineStore
) -> None:
    """A truth value of 2 comes out as 1: the same metadata, other bytes, no use for a forecast."""
    model = {
        "entries": {"flag": (T.BOOL, None, True)},
        "tensors": [("F32", (5, 3)), ("I8", (7,)), ("F16", (3,))],
        "split": 2,
        "small_first": False,
        "alignment": 0,
        "seed": 1,
    }
    paths = write(tmp_path, model)
    data = bytearray(paths[0].read_bytes())
    data[read_header(paths[0]).places["x.flag"][1] - 1] = 2
    paths[0].write_bytes(data)
    shards = read_set(paths[0])
    expected = expect_merge(shards)
    assert expected is not None
    tool = engine_store.path("tools") / "bin/llama-gguf-split"
    out = merge(tool, paths[0], tmp_path / "out.gguf")
    with DigestAhead(expected) as ahead:
        digest = check_merged(out, shards, lambda _done, _total: None, ahead)
        assert digest == hashlib.sha256(out.read_bytes()).hexdigest() != ahead.result()


def test_another_alignment_cannot_be_expected(tmp_path: Path) -> None:
    """The tool pads by 32 whatever the model's metadata says: there is no forecast."""
    paths = make_shards(tmp_path, alignment=64)
    assert expect_merge(read_set(paths[0])) is None


def test_a_huge_header_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit there is no forecast; up to it there is."""
    shards = read_set(make_shards(tmp_path)[0])
    size = shards[0].header.header_size
    monkeypatch.setattr(module, "LARGEST_HEADER", size)
    assert expect_merge(shards) is not None
    monkeypatch.setattr(module, "LARGEST_HEADER", size - 1)
    assert expect_merge(shards) is None


def test_a_shard_that_shrank_is_named(tmp_path: Path) -> None:
    """Shortened after its header was read: the digest is refused, not made of less."""
    paths = make_shards(tmp_path)
    expected = expect_merge(read_set(paths[0]))
    assert expected is not None
    cut(paths[2], 140)
    with (
        DigestAhead(expected) as ahead,
        pytest.raises(InvalidModel, match=r"00003.*blk\.5\.weight"),
    ):
        ahead.result()


def vast(folder: Path, size: int) -> ExpectedMerge:
    """A model of one tensor of zeros, which takes no room on the disk."""
    path = folder / "vast"
    with path.open("wb") as file:
        file.truncate(size)
    return ExpectedMerge(b"GGUF".ljust(32), (Span("t", 32, size, path, 0),))


def test_leaving_early_stops_the_work(tmp_path: Path) -> None:
    """Eight terabytes would take an hour; there is no digest of a part of them."""
    with DigestAhead(vast(tmp_path, 8 << 40)) as ahead:
        pass
    with pytest.raises(Cancelled):
        ahead.result()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """One buffer, whatever the size."""
    expected = vast(tmp_path, 256 << 20)
    tracemalloc.start()
    try:
        with DigestAhead(expected) as ahead:
            digest = ahead.result()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest == hashlib.sha256(b"GGUF".ljust(32) + bytes(256 << 20)).hexdigest()
    assert peak < 8 << 20
