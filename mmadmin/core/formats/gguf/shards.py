"""Shard sets: `name-00001-of-00003.gguf` and its siblings, as llama.cpp splits models.

Names count from 1, the key `split.no` from 0; `split.tensors.count` is the whole set's count and
stands in every shard. A set is used only when it is complete and all of it says the same; what is
wrong is said with the shard's name. (The merge tool itself names the first shard whatever is wrong,
and merges truncated and foreign shards without a word.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.gguf.header import GgufHeader, Value, read_header

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
NO, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_KEYS = frozenset({NO, COUNT, TENSORS})


@dataclass(frozen=True, slots=True)
class ShardName:
    """A shard's file name, taken apart."""

    stem: str
    index: int
    """1-based."""
    count: int

    def sibling(self, index: int) -> str:
        """The name of another shard of the same set."""
        return f"{self.stem}-{index:05d}-of-{self.count:05d}.gguf"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard on disk, its header read."""

    path: Path
    header: GgufHeader


def parse_name(name: str) -> ShardName | None:
    """Take a shard name apart; None for a file that is not a shard.

    Raises `InvalidModel` for an index of 0 or beyond the count.
    """
    found = SHARD_NAME.fullmatch(name)
    if found is None:
        return None
    shard = ShardName(found["stem"], int(found["index"]), int(found["count"]))
    if not 1 <= shard.index <= shard.count:
        raise InvalidModel(
            f"{name}: shard {shard.index} of {shard.count} cannot be",
            remedy="shards are numbered from 00001; check the file's name",
            file=name,
        )
    return shard


def set_names(name: str) -> list[str]:
    """All file names of the set that `name` belongs to, in order; just itself for a single file."""
    shard = parse_name(name)
    if shard is None:
        return [name]
    return [shard.sibling(index) for index in range(1, shard.count + 1)]


def find_set(one: Path) -> list[Path]:
    """The paths of a complete set, from any of its shards. Raises `InvalidModel`."""
    paths = [one.parent / name for name in set_names(one.name)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise InvalidModel(
            f"the shard set is incomplete: {', '.join(missing)} missing",
            remedy=f"fetch all {len(paths)} shards, of one revision",
            missing=missing,
        )
    return paths


def read_set(one: Path) -> list[Shard]:
    """Read and check a whole set, from any of its shards. Raises `InvalidModel`."""
    shards = [Shard(path, read_header(path)) for path in find_set(one)]
    check_set(shards)
    return shards


def check_set(shards: Sequence[Shard]) -> None:
    """Refuse a set whose parts do not belong together, naming the shard that differs."""
    if len(shards) == 1 and (shards[0].header.integer(COUNT) or 0) == 0:
        return  # a whole model (a merged one keeps the key, as 0), whatever it is called
    for index, shard in enumerate(shards):
        _expect(shard, NO, index, f"it is shard {index + 1} by its name")
        _expect(shard, COUNT, len(shards), f"the set has {len(shards)} files")
    _check_tensor_count(shards)
    _check_tensors_once(shards)
    _check_metadata(shards)


def _refuse(shard: Shard, what: str, remedy: str = "") -> NoReturn:
    name = shard.path.name
    raise InvalidModel(
        f"{name}: {what}",
        remedy=remedy or "fetch this shard again, of the same revision as the others",
        file=name,
    )


def _expect(shard: Shard, key: str, wanted: int, why: str) -> None:
    found = shard.header.integer(key)
    if found is None:
        _refuse(shard, f"it is not part of a split model (no {key})")
    told = found + 1 if key == NO else found
    if found != wanted:
        word = "shard" if key == NO else key
        _refuse(shard, f"it says that it is {word} {told}, but {why}", _swapped(key))


def _swapped(key: str) -> str:
    if key == NO:
        return "shards were swapped, copied or renamed: restore the names that the source has"
    return ""


def _check_tensor_count(shards: Sequence[Shard]) -> None:
    counts = [shard.header.integer(TENSORS) for shard in shards]
    usual, _times = Counter(counts).most_common(1)[0]
    for shard, count in zip(shards, counts, strict=True):
        if count is None:
            _refuse(shard, f"it has no {TENSORS}")
        if count != usual:
            _refuse(
                shard,
                f"it belongs to a model of {count} tensors, the others to one of {usual}",
                "the shards are of different builds: fetch all of one revision",
            )
    held = [len(shard.header.tensors) for shard in shards]
    if sum(held) != usual:
        parts = ", ".join(f"{s.path.name}: {n}" for s, n in zip(shards, held, strict=True))
        raise InvalidModel(
            f"the set holds {sum(held)} tensors where {usual} are announced ({parts})",
            remedy="the shards are of different builds: fetch all of one revision",
            held=held,
        )


def _check_tensors_once(shards: Sequence[Shard]) -> None:
    where: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            if tensor.name in where:
                _refuse(shard, f"its tensor {tensor.name} is in {where[tensor.name]} too")
            where[tensor.name] = shard.path.name


def _check_metadata(shards: Sequence[Shard]) -> None:
    """A later shard may repeat keys of the first; then they must say the same."""
    first = shards[0].header
    for shard in shards[1:]:
        for key, value in shard.header.metadata.items():
            if key not in SPLIT_KEYS and key in first.metadata and first.metadata[key] != value:
                _refuse(shard, f"its {key} is {_short(value)}, the first shard's is otherwise")


def _short(value: Value) -> str:
    return repr(value)[:60]
