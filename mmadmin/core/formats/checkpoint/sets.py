"""Which files of a repository are one checkpoint, and which one a selector means.

A checkpoint is a folder: weights in one safetensors file or in shards with an index, `config.json`,
and tokenizer, processor and template files beside them. Names decide here; what the files hold is
checked by `mmadmin.core.formats.checkpoint.model`. It promises:

- pickles (`pytorch_model.bin`, `*.pth`) are listed by name and never chosen: loading one runs code;
- weights in Mistral's own layout (`consolidated*.safetensors`), adapters and weights without a
  `config.json` are never taken for the model;
- a set with a missing shard is never selected;
- Python files of a repository are left out: nothing from there is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from mmadmin.core.errors import InvalidModel, InvalidSpec, NotFound
from mmadmin.core.formats.protocol import RepoFile

SetKind = Literal["model", "native", "adapter", "weights", "pickle"]

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
CONFIG = "config.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle")
BESIDE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "LICENSE*")
"""Files of a checkpoint besides its weights."""
OF_OTHERS = ("*.index.json", "adapter_config.json", "params.json")
"""Of these, what belongs to other weights of the folder."""
QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:FP8(?:[-_]DYNAMIC)?|NVFP4(?:A16)?|MXFP4|W\d+A\d+|INT[48]|AWQ|GPTQ|BF16)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CheckpointSet:
    """One checkpoint's files: its weights in order, then those beside them."""

    name: str
    """Folder and stem of the weights: `model`, `fp8/model`."""
    kind: SetKind
    files: tuple[RepoFile, ...]
    shards: int
    """How many files its weights must have."""
    missing: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[RepoFile, ...]:
        """The files with tensors, in order."""
        return self.files[: self.shards - len(self.missing)]

    @property
    def beside(self) -> Mapping[str, RepoFile]:
        """The other files, by name."""
        return {file_name(file.path): file for file in self.files[len(self.weights) :]}

    @property
    def stem(self) -> str:
        """The weights' name without folder, shard number and ending."""
        return file_name(self.name)

    @property
    def quant(self) -> str | None:
        """What folder or stem say of the quantisation."""
        found = QUANT.search(self.name)
        return found[0] if found else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def label(self) -> str:
        """What a person would type to mean this set."""
        return self.name


def file_name(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


def owns(path: str) -> bool:
    """True for files with weights: safetensors, and pickles, which are refused by name."""
    return path.endswith(SUFFIX) or is_pickle(path)


def group(files: Iterable[RepoFile]) -> tuple[CheckpointSet, ...]:
    """The sets of a listing: models first, then by kind, size and name."""
    folders: dict[str, list[RepoFile]] = {}
    for file in files:
        folders.setdefault(file.path.rpartition("/")[0], []).append(file)
    found = [one for name, listed in folders.items() for one in _of_folder(name, listed)]
    return tuple(sorted(found, key=lambda s: (s.kind != "model", s.kind, s.size_bytes, s.name)))


def select(files: Iterable[RepoFile], selector: str | None) -> CheckpointSet:
    """The one complete model that `selector` means: its name, its folder, or one of its files.

    None or "" means the only one there is. Raises `NotFound`, `InvalidSpec` and `InvalidModel`.
    """
    sets = group(files)
    models = [one for one in sets if one.kind == "model"]
    wanted = (selector or "").strip()
    chosen = [one for one in models if not wanted or _means(wanted, one)]
    names = "; ".join(f"{one.name} ({one.size_bytes:,} bytes)" for one in models)
    details = {"field": "model.folder", "candidates": [one.label for one in models]}
    if not models:
        _refuse_others(sets)
    if not chosen:
        raise NotFound(
            f"no checkpoint in this repository matches {wanted!r}",
            remedy=f"choose one of: {names}",
            **details,
        )
    if len(chosen) > 1:
        raise InvalidSpec(
            f"this repository holds {len(chosen)} checkpoints that {wanted!r} may mean"
            if wanted
            else f"this repository holds {len(chosen)} checkpoints and none was named",
            remedy=f"name one: {names}",
            **details,
        )
    if chosen[0].missing:
        raise InvalidModel(
            f"{chosen[0].name}: shard {', '.join(map(str, chosen[0].missing))} of "
            f"{chosen[0].shards} is not in the repository",
            remedy="choose another revision of the repository",
            missing=list(chosen[0].missing),
        )
    return chosen[0]


def _refuse_others(sets: Sequence[CheckpointSet]) -> None:
    """Say what the repository has instead of a checkpoint."""
    names = ", ".join(one.files[0].path for one in sets)
    if any(one.kind == "pickle" for one in sets):
        raise InvalidModel(
            f"its weights are pickles ({names}): loading a pickle runs the code in it",
            remedy="choose a repository or revision with .safetensors files",
            files=[one.files[0].path for one in sets],
        )
    raise NotFound(
        f"this repository holds no checkpoint: {names} has no {CONFIG} beside it"
        if names
        else "this repository holds no checkpoint (safetensors files with a config.json)",
        remedy="choose another repository",
        field="model.repo",
        candidates=[],
    )


def _means(selector: str, one: CheckpointSet) -> bool:
    folder = one.name.rpartition("/")[0]
    return selector in {one.name, folder, f"{folder}/", *(file.path for file in one.files)}


def is_pickle(path: str) -> bool:
    """True for weights that only running code can load, by their name."""
    return any(fnmatch(file_name(path), pattern) for pattern in PICKLES)


def _of_folder(folder: str, files: Sequence[RepoFile]) -> list[CheckpointSet]:
    names = {file_name(file.path) for file in files}
    beside = [f for f in files if any(fnmatch(file_name(f.path), name) for name in BESIDE)]
    found: dict[tuple[str, int, bool], dict[int, RepoFile]] = {}
    for file in files:
        pickle = is_pickle(file.path)
        if not pickle and not file.path.endswith(SUFFIX):
            continue
        stem, number, count = file_name(file.path).rpartition(".")[0], 1, 0
        shard = SHARD.fullmatch(stem)
        if shard and 1 <= int(shard["number"]) <= int(shard["count"]):
            stem, number, count = shard["stem"], int(shard["number"]), int(shard["count"])
        found.setdefault((stem, count, pickle), {})[number] = file
    sets: list[CheckpointSet] = []
    for (stem, count, pickle), shards in found.items():
        kind = "pickle" if pickle else _kind(stem, names)
        others = [f for f in beside if kind == "model" and _belongs(file_name(f.path), stem)]
        total = count or 1
        sets.append(
            CheckpointSet(
                f"{folder}/{stem}" if folder else stem,
                kind,
                (*(shards[n] for n in sorted(shards)), *sorted(others, key=lambda f: f.path)),
                total,
                tuple(n for n in range(1, total + 1) if n not in shards)[:100],
            )
        )
    return sets


def _kind(stem: str, names: set[str]) -> SetKind:
    if stem.startswith("consolidated"):
        return "native"
    if stem.startswith("adapter"):
        return "adapter"
    return "model" if CONFIG in names else "weights"


def _belongs(name: str, stem: str) -> bool:
    return name == f"{stem}{INDEX}" or not any(fnmatch(name, other) for other in OF_OTHERS)
