"""The model format: one JSON file that ends in `.toy`, with a name, a context and words to say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmadmin.core.build.recipe import Toolbox
from mmadmin.core.engines.protocol import ModelFacts
from mmadmin.core.errors import InvalidModel, NotFound
from mmadmin.core.formats.protocol import (
    FileSet,
    ModelFormat,
    Open,
    RepoFile,
    ReportLabel,
    ReportTable,
)

SUFFIX = ".toy"
LIMIT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ToyHeader:
    """What a model says about itself."""

    name: str
    context_train: int
    words: int
    size_bytes: int

    @property
    def architecture(self) -> str:
        """There is one."""
        return "toy"

    @property
    def parameters(self) -> int:
        """A word is one."""
        return self.words


@dataclass(frozen=True, slots=True)
class ToySet:
    """One file."""

    file: RepoFile
    kind: str = "model"
    quant: str | None = None
    shards: int = 1
    missing: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The path without its ending."""
        return self.file.path.removesuffix(SUFFIX)

    @property
    def label(self) -> str:
        """The same."""
        return self.name

    @property
    def files(self) -> tuple[RepoFile, ...]:
        """The one."""
        return (self.file,)

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.file.size_bytes


def parse(text: bytes, label: str) -> ToyHeader:
    """A model's header. Raises `InvalidModel`."""
    try:
        data = json.loads(text)
        return ToyHeader(data["name"], int(data["context"]), len(data["words"]), len(text))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"{label} is not a toy model", remedy="write a new one") from error


class ToyFormat:
    """Models of words."""

    kind = "toy"
    report_recipe = "toy-report"

    def owns(self, path: str) -> bool:
        """By its ending."""
        return path.endswith(SUFFIX)

    def group(self, files: Iterable[RepoFile]) -> Sequence[ToySet]:
        """Each file is a set."""
        return [ToySet(file) for file in files if self.owns(file.path)]

    def select(self, files: Iterable[RepoFile], selector: str | None) -> ToySet:
        """By name, or the only one."""
        found = [one for one in self.group(files) if selector in (None, one.name, one.file.path)]
        if len(found) != 1:
            raise NotFound(f"{len(found)} toy models match {selector!r}", remedy="name one")
        return found[0]

    def attachment(self, files: Iterable[RepoFile], model: FileSet) -> str | None:
        """None."""

    def read_header(self, path: Path) -> ToyHeader:
        """From the disk."""
        return parse(path.read_bytes()[:LIMIT_BYTES], path.name)

    def read_remote(self, chosen: FileSet, open_file: Open) -> ToyHeader:
        """The whole file, which is small."""
        (file,) = chosen.files
        return parse(open_file(file).read(LIMIT_BYTES), file.path)

    def read_remote_template(self, chosen: FileSet, open_file: Open) -> str | None:
        """It has none."""

    def scaled(self, header: ToyHeader, wanted: FileSet, read: FileSet) -> ToyHeader:
        """There are no quants."""
        return header

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """From `toy-report`."""
        return ModelFacts(
            architecture="toy",
            size_bytes=int(report["size_bytes"]),
            context_length=int(report["context_length"]),
            metadata=dict(report),
        )

    def report_fields(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """Flat already."""
        return {name: str(value) for name, value in report.items()}

    def tables(self, report: Mapping[str, Any]) -> Sequence[ReportTable]:
        """None: its report is short."""
        return []

    def label_of(self, name: str) -> ReportLabel | None:
        """Only the size has a unit."""
        return ReportLabel("size", "bytes") if name == "size_bytes" else None

    def read_template(self, path: Path, tools: Toolbox) -> str | None:
        """It has none."""

    def difference(self, before: Path, after: Path) -> tuple[str, Sequence[str]]:
        """All or nothing."""
        return ("equal", ()) if before.read_bytes() == after.read_bytes() else ("differs", ("*",))


FORMAT: ModelFormat = ToyFormat()
