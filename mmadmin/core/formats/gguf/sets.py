"""Which files of a repository are one model, and which one a selector means.

A repository lists files; a person names a quant (`Q4_K_M`, `UD-Q4_K_XL`), a file or a folder.
This module groups the files into sets (a single GGUF, or all shards of one) and resolves a
selector to exactly one complete set, or raises an error that lists the candidates. It promises:

- a selector matches whole tokens only, whatever their case: `Q4_K` is not `Q4_K_M`;
- a variant prefix is part of the quant: `UD-Q4_K_XL` is not `Q4_K_XL`, `I-Q8_0` is not `Q8_0`;
- projectors, draft heads and importance matrices are not taken for the model by a quant, as long as
  the repository has a model; a file that is named is taken, and its header decides what it is;
- a shard set with a missing number is never selected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmadmin.core.errors import InvalidModel, InvalidSpec, NotFound
from mmadmin.core.formats.protocol import RepoFile

SetKind = Literal["model", "mmproj", "draft", "imatrix", "vocab", "adapter"]

SUFFIX = ".gguf"
SHARD_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})$")
"""llama.cpp's `llama_split_path`: five digits, one-based."""
QUANT = re.compile(
    r"(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP\d+(?:_[A-Z0-9]+)*|NVFP4(?:_[A-Z0-9]+)*)",
    re.IGNORECASE,
)
VARIANTS = frozenset({"ud", "i", "i1"})
"""Prefixes that name another recipe for the same quant: Unsloth dynamic, importance matrix."""
DRAFT_WORDS = frozenset({"mtp", "eagle3", "dflash", "dspark", "draft"})
"""Heads and models for speculative decoding (llama.cpp's `common/download.cpp` skips the same)."""


@dataclass(frozen=True, slots=True)
class GgufSet:
    """One GGUF, whole: its only file or all its shards in order."""

    name: str
    """Path without shard suffix and `.gguf`: unique among complete sets of a repository."""
    kind: SetKind
    quant: str | None
    """`Q4_K_M`, `UD-Q4_K_XL` … as the repository writes it; None where no token says."""
    files: tuple[RepoFile, ...]
    """Shards in order; the first holds the metadata."""
    shards: int
    """How many files the set must have."""
    missing: tuple[int, ...] = ()
    """One-based numbers of the shards that the repository lacks."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def complete(self) -> bool:
        """True when every shard is listed."""
        return not self.missing

    @property
    def label(self) -> str:
        """What a person would type to mean this set."""
        return self.quant or self.name


def tokens_of(text: str) -> tuple[str, ...]:
    """The lower-case tokens of a name; a variant prefix is one token with its quant.

    `m-UD-Q4_K_XL` → `("m", "ud-q4_k_xl")`; a quant glued on with `_` is split off.
    """
    words: list[str] = []
    for word in re.split(r"[-. /+]+", text):
        if not word:
            continue
        glued = re.fullmatch(rf"(.+?)_({QUANT.pattern})", word, re.IGNORECASE)
        whole = QUANT.fullmatch(word)
        words.extend(glued.groups() if glued and not whole else (word,))
    tokens: list[str] = []
    for word in words:
        if tokens and tokens[-1] in VARIANTS and QUANT.fullmatch(word):
            tokens[-1] = f"{tokens[-1]}-{word.lower()}"
        else:
            tokens.append(word.lower())
    return tuple(tokens)


def is_quant(token: str) -> bool:
    """True for a token such as `q4_k_m` or `ud-q4_k_xl`."""
    return QUANT.fullmatch(_without_variant(token)) is not None


def group(files: Iterable[RepoFile]) -> tuple[GgufSet, ...]:
    """The GGUF sets of a listing, sorted by kind (models first), size and name.

    Files that are not GGUF are left out. A name like `best-of-breed.gguf`, and one whose shard
    number is 0 or above the count, is a file of its own. Where no name is a model's, the words in
    the names are not believed: `m-lora-merged-Q4_1.gguf` may be all that a repository offers.
    """
    sets: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        if not file.path.lower().endswith(SUFFIX):
            continue
        stem = file.path[: -len(SUFFIX)]
        number, count = 1, 0
        if match := SHARD_SUFFIX.search(stem):
            index, total = int(match[1]), int(match[2])
            if 1 <= index <= total:
                stem, number, count = stem[: match.start()], index, total
        sets.setdefault((stem, count), {})[number] = file
    found = [_set(stem, count, shards) for (stem, count), shards in sets.items()]
    if not any(one.kind == "model" for one in found):
        found = [replace(one, kind="model") if _may_be_model(one) else one for one in found]
    return tuple(sorted(found, key=lambda s: (s.kind != "model", s.kind, s.size_bytes, s.name)))


def select(files: Iterable[RepoFile], selector: str | None, *, kind: SetKind = "model") -> GgufSet:
    """The one complete set that `selector` means.

    `selector` is a quant (`q4_k_m`), a run of whole tokens (`27b-q4_k_m`), a file's path, or a
    folder's path with its final `/`; None or "" means "the only one there is".
    Raises `NotFound` for no match, `InvalidSpec` for several, both with `details["candidates"]`;
    `InvalidModel` when shards are missing.
    """
    wanted = (selector or "").strip()
    sets = group(files)
    candidates = [s for s in sets if s.kind == kind or _is_file_of(wanted, s)]
    matches = [s for s in candidates if not wanted or _means(wanted, s)]
    named = [f"{s.label} ({s.name}, {s.size_bytes:,} bytes)" for s in candidates]
    details = {"field": "model.quant", "candidates": [s.label for s in candidates]}
    what = "model" if kind == "model" else kind
    if not matches:
        raise NotFound(
            f"no {what} in this repository matches {wanted!r}"
            if wanted
            else f"this repository holds no {what} in GGUF form",
            remedy=f"choose one of: {'; '.join(named)}" if named else "choose another repository",
            **details,
        )
    if len(matches) > 1:
        few = [f"{s.label} ({s.name}, {s.size_bytes:,} bytes)" for s in matches]
        raise InvalidSpec(
            f"{wanted!r} matches {len(matches)} {what} sets"
            if wanted
            else f"this repository holds {len(matches)} {what} sets and no quant was named",
            remedy=f"name one, or give a file's path: {'; '.join(few)}",
            **(details | {"candidates": [s.label for s in matches]}),
        )
    return _whole(matches[0])


def sibling(files: Iterable[RepoFile], model: GgufSet, kind: SetKind) -> GgufSet | None:
    """The projector (or draft head) nearest to `model`: same folder first, then the smallest.

    None when the repository has none. Raises `InvalidModel` when the only one is incomplete.
    """
    folder = model.name.rpartition("/")[0]
    found = [s for s in group(files) if s.kind == kind]
    if not found:
        return None
    complete = [s for s in found if s.complete]
    if not complete:
        return _whole(found[0])
    return min(complete, key=lambda s: (s.name.rpartition("/")[0] != folder, s.size_bytes, s.name))


def _set(stem: str, count: int, shards: dict[int, RepoFile]) -> GgufSet:
    total = count or 1
    return GgufSet(
        name=stem,
        kind=_kind(stem),
        quant=_quant(stem),
        files=tuple(shards[number] for number in sorted(shards)),
        shards=total,
        missing=tuple(n for n in range(1, total + 1) if n not in shards),
    )


def _kind(stem: str) -> SetKind:
    name = stem.rpartition("/")[2]
    words = [word for word in re.split(r"[-._ +]+", name) if word]
    lower = [word.lower() for word in words]
    first = lower[0] if lower else ""
    if any(word.startswith("mmproj") for word in lower):
        return "mmproj"
    if "imatrix" in lower and not _quant(stem):  # a matrix itself has no quant
        return "imatrix"
    # "Model-MTP-Q8_0" is a whole model that kept its head; "model-mtp-Q8_0" is the head alone.
    if first in DRAFT_WORDS or any(word in DRAFT_WORDS for word in words):
        return "draft"
    if "vocab" in lower and first in {"ggml", "vocab"}:
        return "vocab"
    if "lora" in lower:
        return "adapter"
    return "model"


def _quant(stem: str) -> str | None:
    """The last quant token of the file name, else of the nearest folder, in its own spelling."""
    for component in reversed(stem.split("/")):
        for token in reversed(tokens_of(component)):
            if is_quant(token):
                start = component.lower().rfind(token)
                return component[start : start + len(token)] if start >= 0 else token.upper()
    return None


def _means(selector: str, candidate: GgufSet) -> bool:
    if selector.lower().endswith(SUFFIX):
        return _is_file_of(selector, candidate)
    folder, _, name = candidate.name.rpartition("/")
    if selector in (candidate.name, f"{folder}/"):
        return True
    wanted = tokens_of(selector)
    if _run(wanted, tokens_of(name)):
        return True
    # A folder speaks for a file only where the file's own name says no other quant.
    quant_wanted = any(is_quant(token) for token in wanted)
    if quant_wanted and any(is_quant(token) for token in tokens_of(name)):
        return False
    return any(_run(wanted, tokens_of(component)) for component in folder.split("/"))


def _is_file_of(selector: str, candidate: GgufSet) -> bool:
    return any(selector in (f.path, f.path.rpartition("/")[2]) for f in candidate.files)


def _may_be_model(one: GgufSet) -> bool:
    """True for a set that only a word in its name calls something else."""
    doubted = one.kind in ("draft", "adapter", "mmproj")
    return doubted and one.quant is not None and not _file_name(one).lower().startswith("mmproj")


def _file_name(one: GgufSet) -> str:
    return one.name.rpartition("/")[2]


def _run(wanted: Sequence[str], tokens: Sequence[str]) -> bool:
    size = len(wanted)
    return size > 0 and any(
        tuple(tokens[i : i + size]) == tuple(wanted) for i in range(len(tokens) - size + 1)
    )


def _without_variant(token: str) -> str:
    head, dash, rest = token.partition("-")
    return rest if dash and head in VARIANTS else token


def _whole(found: GgufSet) -> GgufSet:
    if found.missing:
        numbers = ", ".join(str(n) for n in found.missing)
        raise InvalidModel(
            f"{found.name}: shard {numbers} of {found.shards} is not in the repository",
            remedy="choose another quant, or another revision of the repository",
            missing=list(found.missing),
        )
    return found
