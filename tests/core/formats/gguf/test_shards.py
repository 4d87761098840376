"""Shard sets: names, completeness, and who is to blame."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.gguf.shards import (
    ShardName,
    find_set,
    parse_name,
    read_set,
    set_names,
)
from tests.support.models import LFS_POINTER, cut, make_model, make_shards


def test_names_are_taken_apart_and_put_together() -> None:
    """1-based names, five digits; what is no shard is said to be none."""
    assert parse_name("m-Q4_K_M-00002-of-00003.gguf") == ShardName("m-Q4_K_M", 2, 3)
    assert set_names("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for name in ("best-of-breed.gguf", "m.gguf", "m-1-of-3.gguf", "m-00001-of-00003.bin"):
        assert parse_name(name) is None
        assert set_names(name) == [name]
    assert parse_name("model-00001-of-00001.gguf") == ShardName("model", 1, 1)


@pytest.mark.parametrize(
    "name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00000-of-00000.gguf"]
)
def test_impossible_numbers_are_refused(name: str) -> None:
    """Index 0 and an index beyond the count cannot be."""
    with pytest.raises(InvalidModel, match="cannot be"):
        parse_name(name)


def test_a_good_set_is_read_from_any_of_its_shards(tmp_path: Path) -> None:
    """Shard 2 leads to the whole set, in order."""
    paths = make_shards(tmp_path)
    assert len(paths) == 3
    for path in paths:
        shards = read_set(path)
        assert [shard.path for shard in shards] == paths
        assert sum(len(shard.header.tensors) for shard in shards) == 6


def test_a_set_of_one_is_complete(tmp_path: Path) -> None:
    """`-00001-of-00001` needs no siblings, with and without split keys."""
    (path,) = make_model(tmp_path / "m-00001-of-00001.gguf")
    assert len(read_set(path)) == 1
    write_shard(tmp_path / "n-00001-of-00001.gguf", 0, 1, "llama")
    assert len(read_set(tmp_path / "n-00001-of-00001.gguf")) == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_shard_is_named(number: int, tmp_path: Path) -> None:
    """Whichever is missing, its name is said, and before anything is read."""
    paths = make_shards(tmp_path)
    paths[number - 1].unlink()
    with pytest.raises(InvalidModel, match=f"incomplete: {paths[number - 1].name} missing"):
        find_set(paths[number % 3])


def test_a_shard_cut_after_its_header_is_named(tmp_path: Path) -> None:
    """140 bytes off shard 3: the merge tool takes it, we name it."""
    paths = make_shards(tmp_path)
    cut(paths[2], 140)
    with pytest.raises(InvalidModel, match=r"m-00003-of-00003\.gguf.*cut short"):
        read_set(paths[0])


def test_a_shard_cut_within_its_data_is_named(tmp_path: Path) -> None:
    """Shard 2 cut to 400 bytes, header whole: named too."""
    paths = make_shards(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:400])
    with pytest.raises(InvalidModel, match=r"m-00002-of-00003\.gguf"):
        read_set(paths[0])


def test_a_shard_of_another_model_is_named(tmp_path: Path) -> None:
    """Shard 3 of a build with 5 tensors under the right name: the merge tool takes it."""
    paths = make_shards(tmp_path / "a")
    others = make_shards(tmp_path / "b", tensors=5, seed=2)
    shutil.copyfile(others[2], paths[2])
    with pytest.raises(
        InvalidModel, match=r"m-00003-of-00003\.gguf: it belongs to a model of 5 tensors"
    ):
        read_set(paths[0])


def test_swapped_shards_are_named(tmp_path: Path) -> None:
    """Names of 2 and 3 swapped: the merge tool takes it and gives another file."""
    paths = make_shards(tmp_path)
    paths[1].rename(tmp_path / "hold")
    paths[2].rename(paths[1])
    (tmp_path / "hold").rename(paths[2])
    with pytest.raises(InvalidModel, match=r"m-00002-of-00003\.gguf: it says that it is shard 3"):
        read_set(paths[0])


def test_a_copied_shard_is_named(tmp_path: Path) -> None:
    """Shard 2 copied as 3: the merge tool aborts, we name it."""
    paths = make_shards(tmp_path)
    shutil.copyfile(paths[1], paths[2])
    with pytest.raises(InvalidModel, match=r"m-00003-of-00003\.gguf: it says that it is shard 2"):
        read_set(paths[0])


@pytest.mark.parametrize("content", [LFS_POINTER, "<!doctype html><title>Log in</title>", ""])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_pointer_or_page_instead_of_a_shard_is_named(
    number: int, content: str, tmp_path: Path
) -> None:
    """The tool's error always names the first shard; ours names the one."""
    paths = make_shards(tmp_path)
    paths[number - 1].write_text(content)
    with pytest.raises(InvalidModel, match=f"m-0000{number}-of-00003"):
        read_set(paths[0])


def test_a_whole_model_under_a_shard_name_is_refused(tmp_path: Path) -> None:
    """A single file renamed to a shard has no split keys."""
    for number in (1, 2):
        make_model(tmp_path / f"m-0000{number}-of-00002.gguf")
    with pytest.raises(InvalidModel, match="not part of a split model"):
        read_set(tmp_path / "m-00001-of-00002.gguf")


def test_a_shard_under_a_plain_name_is_refused(tmp_path: Path) -> None:
    """One of three, renamed so that it looks whole: a loader would miss the rest."""
    paths = make_shards(tmp_path)
    paths[1].rename(tmp_path / "model.gguf")
    with pytest.raises(InvalidModel, match=r"model\.gguf: it says that it is"):
        read_set(tmp_path / "model.gguf")


def write_shard(path: Path, number: int, count: int, name: str) -> None:
    """One shard by hand, which repeats the model's name."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", count)
    writer.add_tensor(f"blk.{number}.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_that_differs_between_shards_is_refused(tmp_path: Path) -> None:
    """A later shard that repeats a key must say the same."""
    for number in range(3):
        write_shard(tmp_path / f"m-0000{number + 1}-of-00003.gguf", number, 3, "one")
    assert len(read_set(tmp_path / "m-00002-of-00003.gguf")) == 3
    write_shard(tmp_path / "m-00003-of-00003.gguf", 2, 3, "two")
    with pytest.raises(InvalidModel, match=r"m-00003-of-00003\.gguf: its general.name is 'two'"):
        read_set(tmp_path / "m-00001-of-00003.gguf")


def test_a_tensor_that_is_in_two_shards_is_refused(tmp_path: Path) -> None:
    """The same tensor twice would be merged once or abort the tool."""
    write_shard(tmp_path / "m-00001-of-00002.gguf", 0, 2, "one")
    data = (tmp_path / "m-00001-of-00002.gguf").read_bytes()
    at = data.index(b"split.no") + len("split.no") + 4
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(data[:at] + b"\1" + data[at + 1 :])
    with pytest.raises(InvalidModel, match=r"m-00002-of-00002\.gguf: its tensor blk\.0\.weight"):
        read_set(tmp_path / "m-00001-of-00002.gguf")
