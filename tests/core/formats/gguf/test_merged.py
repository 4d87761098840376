"""Merged files beside their shards: proven byte for byte, with and without a forecast."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mmadmin.core.errors import Cancelled, InvalidModel
from mmadmin.core.formats.gguf import merged as module
from mmadmin.core.formats.gguf.expected_merge import DigestAhead, ExpectedMerge, Span, expect_merge
from mmadmin.core.formats.gguf.header import read_header
from mmadmin.core.formats.gguf.merged import check_merged
from mmadmin.core.formats.gguf.shards import Shard, read_set
from tests.support.models import make_shards


def merge(shards: Sequence[Shard], out: Path) -> ExpectedMerge:
    """Write the merge as it was expected (which is how the tool does: see `test_expected`)."""
    expected = expect_merge(shards)
    assert expected is not None
    data = bytearray(expected.header.ljust(expected.size, b"\0"))
    for span in expected.spans:
        source = span.source.read_bytes()
        data[span.at : span.end] = source[span.offset : span.offset + span.size]
    out.write_bytes(data)
    return expected


def poke(path: Path, at: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def quiet(done: int, total: int) -> None:
    """Report nothing."""


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    """Three shards of two tensors each; no tensor's size is a multiple of the next."""
    return read_set(make_shards(tmp_path / "shards", width=101)[0])


@pytest.fixture(params=[(1 << 20, 1 << 20), (100, 64), (4096, 1000), (64, 64)], ids=str)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches and pieces of any size, whole and with a rest."""
    stretch, compared = request.param
    monkeypatch.setattr(module, "STRETCH", stretch)
    monkeypatch.setattr(module, "COMPARED", compared)


@pytest.mark.usefixtures("pieces")
def test_a_sound_merge_has_the_expected_digest(tmp_path: Path, shards: list[Shard]) -> None:
    """It is the file's own; progress ends with every tensor's byte seen."""
    expected = merge(shards, tmp_path / "m.gguf")
    seen: list[tuple[int, int]] = []
    with DigestAhead(expected) as ahead:
        digest = check_merged(
            tmp_path / "m.gguf", shards, lambda done, total: seen.append((done, total)), ahead
        )
    assert digest == hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    assert seen[-1] == (sum(span.size for span in expected.spans), expected.size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("forecast", [True, False])
def test_every_tensors_first_and_last_byte_counts(
    forecast: bool, tmp_path: Path, shards: list[Shard]
) -> None:
    """With and without a forecast: one changed byte, and the tensor and its shard are named."""
    expected = merge(shards, tmp_path / "m.gguf")
    for span in expected.spans:
        for at in (span.at, span.at + span.size // 2, span.end - 1):
            poke(tmp_path / "m.gguf", at)
            words = f"tensor {span.tensor} differs from {span.source.name}"
            with pytest.raises(InvalidModel, match=words), DigestAhead(expected) as ahead:
                check_merged(tmp_path / "m.gguf", shards, quiet, ahead if forecast else None)
            poke(tmp_path / "m.gguf", at)


def test_every_byte_of_the_header_counts(tmp_path: Path, shards: list[Shard]) -> None:
    """A changed byte is refused, or part of the digest: never under the expected one."""
    expected = merge(shards, tmp_path / "m.gguf")
    with DigestAhead(expected) as ahead:
        for at in range(len(expected.header)):
            poke(tmp_path / "m.gguf", at)
            try:
                digest = check_merged(tmp_path / "m.gguf", shards, quiet, ahead)
            except InvalidModel:
                pass
            else:
                data = (tmp_path / "m.gguf").read_bytes()
                assert digest == hashlib.sha256(data).hexdigest() != ahead.result()
            poke(tmp_path / "m.gguf", at)


def other_padding(path: Path, expected: ExpectedMerge) -> None:
    """A byte between two tensors that is no zero."""
    begin, end = next(gap for gap in expected.gaps if gap[0] < gap[1])
    assert begin < end
    poke(path, begin)


def other_end(path: Path, expected: ExpectedMerge) -> None:
    """More bytes after the last tensor."""
    path.write_bytes(path.read_bytes() + bytes(32))


def other_start(path: Path, expected: ExpectedMerge) -> None:
    """A header that means the same in other bytes: version 2."""
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)


@pytest.mark.parametrize("change", [other_padding, other_end, other_start])
def test_what_is_laid_out_otherwise_is_hashed_itself(
    change: Callable[[Path, ExpectedMerge], None], tmp_path: Path, shards: list[Shard]
) -> None:
    """Keys and tensors are right, the layout is another: the forecast is not asked."""
    expected = merge(shards, tmp_path / "m.gguf")
    change(tmp_path / "m.gguf", expected)
    never_begun = DigestAhead(expected)  # its result would be an AssertionError
    digest = check_merged(tmp_path / "m.gguf", shards, quiet, never_begun)
    assert digest == hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()


def test_tensors_in_another_order_are_compared_and_hashed(
    tmp_path: Path, shards: list[Shard]
) -> None:
    """A tool that lays the shards out backwards writes another file, and an honest one."""
    backwards = [shards[0], *reversed(shards[1:])]
    merge(backwards, tmp_path / "m.gguf")
    expected = expect_merge(shards)
    assert expected is not None
    with DigestAhead(expected) as ahead:
        digest = check_merged(tmp_path / "m.gguf", shards, quiet, ahead)
        assert digest == hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
        assert digest != ahead.result()
    poke(tmp_path / "m.gguf", read_header(tmp_path / "m.gguf").by_name["blk.3.weight"].offset)
    with pytest.raises(InvalidModel, match=r"blk\.3\.weight differs"):
        check_merged(tmp_path / "m.gguf", shards, quiet)


def test_a_cancelled_comparison_ends(tmp_path: Path, shards: list[Shard]) -> None:
    """Whoever hears of the progress may stop it: what was not begun is not done."""
    expected = merge(shards, tmp_path / "m.gguf")
    compared: list[int] = []

    def cancel(done: int, total: int) -> None:
        compared.append(done)
        raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"), DigestAhead(expected) as ahead:
        check_merged(tmp_path / "m.gguf", shards, cancel, ahead)
    assert len(compared) == 1


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A quarter of a gigabyte is compared in two pieces a thread."""
    size = 256 << 20
    source, out = tmp_path / "source", tmp_path / "out"
    for path in (source, out):
        with path.open("wb") as file:
            file.truncate(size)
    expected = ExpectedMerge(b"", (Span("t", 0, size, source, 0),))
    tracemalloc.start()
    try:
        module._compare(out, expected, quiet)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
