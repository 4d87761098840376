"""Checkpoints (safetensors with a `config.json`) as a model format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mmadmin.core.build.recipe import Toolbox
from mmadmin.core.engines.protocol import ModelFacts
from mmadmin.core.formats.checkpoint import sets
from mmadmin.core.formats.checkpoint.check import ask
from mmadmin.core.formats.checkpoint.difference import difference
from mmadmin.core.formats.checkpoint.model import read_model, read_set, read_template
from mmadmin.core.formats.checkpoint.sets import CheckpointSet
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.core.formats.protocol import (
    FileSet,
    ModelFormat,
    Open,
    RepoFile,
    ReportLabel,
    ReportTable,
)

TENSOR_BYTES = "tensor_bytes."
MODULE = "module."
FILE = "file."
SHORT = 12
"""Characters of a digest that a comparison shows."""
NUMBERS = ("layers", "context_length", "embedding_length", "feed_forward_length", "vocab_size")


class Checkpoint:
    """Safetensors, in one file or in shards, with their configuration and tokenizer."""

    kind = "checkpoint"
    report_recipe = "verify-checkpoint"

    def owns(self, path: str) -> bool:
        """Weights, by their ending."""
        return sets.owns(path)

    def group(self, files: Iterable[RepoFile]) -> Sequence[CheckpointSet]:
        """The sets of a listing, models first."""
        return sets.group(files)

    def select(self, files: Iterable[RepoFile], selector: str | None) -> CheckpointSet:
        """The one complete checkpoint that a name, a folder or a file means."""
        return sets.select(files, selector)

    def attachment(self, files: Iterable[RepoFile], model: FileSet) -> str | None:
        """None: a checkpoint holds its image encoder itself."""

    def read_header(self, path: Path) -> CheckpointShape:
        """The shape; any of its files stands for the checkpoint."""
        return read_model(path)

    def read_remote(self, chosen: FileSet, open_file: Open) -> CheckpointShape:
        """The shape, by its config, its index and the headers of its shards."""
        return read_set(cast("CheckpointSet", chosen), open_file)

    def read_remote_template(self, chosen: FileSet, open_file: Open) -> str | None:
        """From the template's own file, or the tokenizer's configuration."""
        return read_template(cast("CheckpointSet", chosen), open_file)

    def scaled(self, header: CheckpointShape, wanted: FileSet, read: FileSet) -> CheckpointShape:
        """The same layers, weights in proportion to the files."""
        return header.scaled(wanted.size_bytes, read.size_bytes)

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """A `verify-checkpoint` report as `ModelFacts`."""
        return ModelFacts.of_report(report)

    def report_fields(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """Dimensions, quantisation, bytes by type, modules, scales, other files by digest."""
        fields = {name: str(report.get(name) or "") for name in ("architecture", *NUMBERS)}
        quantization = report.get("quantization") or {}
        for name in ("method", "scheme", "group_size", "cache_type"):
            if value := quantization.get(name):
                fields[f"quantization.{name}"] = str(value)
        for name, size in (report.get("tensor_types") or {}).items():
            fields[f"{TENSOR_BYTES}{name}"] = str(size)
        for name, row in (report.get("modules") or {}).items():
            fields[f"{MODULE}{name}"] = f"{row['count']}: {', '.join(row['types'])}"
        scales = report.get("cache_scales") or {}
        for which in ("k", "v"):
            if (row := scales.get(which)) and row["count"]:
                fields[f"cache_scales.{which}"] = f"{row['count']}: {row['least']} to {row['most']}"
        for name, digest in (report.get("file_digests") or {}).items():
            fields[f"{FILE}{name}"] = f"sha256 {digest[:SHORT]}"
        return fields

    def tables(self, report: Mapping[str, Any]) -> Sequence[ReportTable]:
        """Modules by type and size, scales of the K/V cache by layer, files with an effect."""
        modules = [
            (name, str(row["count"]), ", ".join(row["types"]), int(row["bytes"]))
            for name, row in (report.get("modules") or {}).items()
        ]
        found = [ReportTable("Modules", ("Module", "Count", "Types", "Size"), modules)]
        scales = report.get("cache_scales") or {}
        kinds = [which for which in ("k", "v") if (scales.get(which) or {}).get("count")]
        if kinds:
            found.append(
                ReportTable(
                    "K/V cache scales",
                    ("Scale", "Count", "Least", "Largest"),
                    [
                        (
                            which.upper(),
                            *(str(scales[which][n]) for n in ("count", "least", "most")),
                        )
                        for which in kinds
                    ],
                    {which.upper(): [float(v) for v in scales[which]["values"]] for which in kinds},
                    str(scales.get("problem") or ""),
                )
            )
        effects = [(name, text) for name, text in (report.get("effects") or {}).items()]
        if effects:
            found.append(
                ReportTable("Files that change what an engine does", ("File", "Effect"), effects)
            )
        return found

    def label_of(self, name: str) -> ReportLabel | None:
        """Bytes by tensor type, modules, files and scales."""
        if name.startswith(TENSOR_BYTES):
            return ReportLabel(f"tensors in {name.removeprefix(TENSOR_BYTES)}", "bytes")
        if name.startswith(MODULE):
            return ReportLabel(name.removeprefix(MODULE))
        if name.startswith(FILE):
            return ReportLabel(name.removeprefix(FILE))
        return _LABELS.get(name)

    def read_template(self, path: Path, tools: Toolbox) -> str | None:
        """The chat template; any of its files stands for the checkpoint."""
        template = ask(path, tools, template=True)["template"]
        return template if isinstance(template, str) and template else None

    def difference(self, before: Path, after: Path) -> tuple[str, Sequence[str]]:
        """Which tensors differ, and by how much."""
        return difference(before, after)


_LABELS = {
    "quantization.method": ReportLabel("quantization"),
    "quantization.scheme": ReportLabel("scheme"),
    "quantization.group_size": ReportLabel("group size"),
    "quantization.cache_type": ReportLabel("K/V cache"),
    "cache_scales.k": ReportLabel("K scales"),
    "cache_scales.v": ReportLabel("V scales"),
}

FORMAT: ModelFormat = Checkpoint()
