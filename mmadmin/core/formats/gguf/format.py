"""GGUF as a model format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mmadmin.core.build.recipe import Toolbox
from mmadmin.core.engines.protocol import ModelFacts
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.expected_shape import scaled
from mmadmin.core.formats.gguf.header import read_header, tensor_digests
from mmadmin.core.formats.gguf.remote import read_remote, read_remote_template
from mmadmin.core.formats.gguf.report import TEMPLATE
from mmadmin.core.formats.gguf.sets import SUFFIX, GgufSet, group, select, sibling
from mmadmin.core.formats.gguf.shape import ModelShape, shape_of_headers
from mmadmin.core.formats.gguf.shards import find_set
from mmadmin.core.formats.protocol import (
    FileSet,
    ModelFormat,
    Open,
    RepoFile,
    ReportLabel,
    ReportTable,
)

TENSOR_BYTES = "tensor_bytes."
"""Report fields: how many bytes of the tensors have a type."""
SHORT = 12
"""Characters of a digest that a comparison shows."""
FILE_TYPE = "general.file_type"
FILE_TYPES: Mapping[str, str] = {
    "0": "F32",
    "1": "F16",
    "2": "Q4_0",
    "3": "Q4_1",
    "7": "Q8_0",
    "8": "Q5_0",
    "9": "Q5_1",
    "10": "Q2_K",
    "11": "Q3_K_S",
    "12": "Q3_K_M",
    "13": "Q3_K_L",
    "14": "Q4_K_S",
    "15": "Q4_K_M",
    "16": "Q5_K_S",
    "17": "Q5_K_M",
    "18": "Q6_K",
    "19": "IQ2_XXS",
    "20": "IQ2_XS",
    "21": "Q2_K_S",
    "22": "IQ3_XS",
    "23": "IQ3_XXS",
    "24": "IQ1_S",
    "25": "IQ4_NL",
    "26": "IQ3_S",
    "27": "IQ3_M",
    "28": "IQ2_S",
    "29": "IQ2_M",
    "30": "IQ4_XS",
    "31": "IQ1_M",
    "32": "BF16",
    "36": "TQ1_0",
    "37": "TQ2_0",
    "38": "MXFP4_MOE",
    "39": "NVFP4",
    "40": "Q1_0",
    "41": "Q2_0",
}
"""llama.cpp's numbers for what most tensors of a file are (`enum llama_ftype`)."""


class Gguf:
    """Single GGUF files and shard sets."""

    kind = "gguf"
    report_recipe = "verify-gguf"

    def owns(self, path: str) -> bool:
        """By its ending."""
        return path.lower().endswith(SUFFIX)

    def group(self, files: Iterable[RepoFile]) -> Sequence[GgufSet]:
        """The sets of a listing, models first."""
        return group(files)

    def select(self, files: Iterable[RepoFile], selector: str | None) -> GgufSet:
        """The one complete model that a quant, a file or a folder means."""
        return select(files, selector)

    def attachment(self, files: Iterable[RepoFile], model: FileSet) -> str | None:
        """The multimodal projector."""
        projector = sibling(files, cast("GgufSet", model), "mmproj")
        return projector.files[0].path if projector else None

    def read_header(self, path: Path) -> ModelShape:
        """The shape; any shard stands for its whole set."""
        beside = [file for file in sorted(path.parent.iterdir()) if self.owns(file.name)]
        files = [RepoFile(file.name, file.stat().st_size) for file in beside if file.is_file()]
        for one in group(files):
            if path.name in {file.path for file in one.files}:
                return shape_of_headers([read_header(path.parent / f.path) for f in one.files])
        return shape_of_headers([read_header(path)])

    def read_remote(self, chosen: FileSet, open_file: Open) -> ModelShape:
        """The shape, by a few megabytes of a set."""
        return read_remote(cast("GgufSet", chosen), open_file)

    def read_remote_template(self, chosen: FileSet, open_file: Open) -> str | None:
        """From the first file's header."""
        return read_remote_template(cast("GgufSet", chosen), open_file)

    def scaled(self, header: ModelShape, wanted: FileSet, read: FileSet) -> ModelShape:
        """The same layers, weights in proportion to the files."""
        return scaled(header, cast("GgufSet", wanted), cast("GgufSet", read))

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """A `verify-gguf` report as `ModelFacts`; what the file does not say is 0."""
        return ModelFacts.of_report(report)

    def report_fields(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """Every key of the metadata, arrays by count and digest, tensors by type."""
        fields = {key: _text(v) for key, v in sorted((report.get("metadata") or {}).items())}
        for key, count in (report.get("arrays") or {}).items():
            if key not in fields:
                digest = str((report.get("array_digests") or {}).get(key, ""))
                fields[key] = f"{count} items, sha256 {digest[:SHORT]}"
        template = report.get("template_sha256")
        fields.pop(TEMPLATE, None)
        if template:
            fields[TEMPLATE] = f"sha256 {template[:SHORT]}"
        fields["tensors"] = str(report.get("tensor_count", ""))
        for name, size in (report.get("tensor_types") or {}).items():
            fields[f"{TENSOR_BYTES}{name}"] = str(size)
        return fields

    def tables(self, report: Mapping[str, Any]) -> Sequence[ReportTable]:
        """Bytes by tensor type."""
        types = report.get("tensor_types") or {}
        rows = [(str(name), int(size)) for name, size in types.items()]
        return [ReportTable("Tensors", ("Type", "Size"), rows)] if rows else []

    def label_of(self, name: str) -> ReportLabel | None:
        """Bytes by tensor type, and what most tensors are."""
        if name.startswith(TENSOR_BYTES):
            return ReportLabel(f"tensors in {name.removeprefix(TENSOR_BYTES)}", "bytes")
        return ReportLabel("weights, mostly", names=FILE_TYPES) if name == FILE_TYPE else None

    def read_template(self, path: Path, tools: Toolbox) -> str | None:
        """The chat template in the header; any shard stands for its set."""
        template = ask(find_set(path), tools, template=True)["template"]
        return template if isinstance(template, str) and template else None

    def difference(self, before: Path, after: Path) -> tuple[str, Sequence[str]]:
        """Which tensors have other bytes."""
        was, now = (tensor_digests(path, read_header(path)) for path in (before, after))
        names = tuple(
            name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)
        )
        if not names:
            return "only metadata differs", ()
        return f"{len(names)} of {len(was)} tensors differ", names


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)


FORMAT: ModelFormat = Gguf()
