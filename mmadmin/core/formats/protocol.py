"""What a model format is: which files are one model, and what they say about it. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mmadmin.core.build.recipe import Toolbox

if TYPE_CHECKING:
    from mmadmin.core.engines.protocol import ModelFacts


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository at a commit, or of a folder."""

    path: str
    """POSIX path inside the repository."""
    size_bytes: int
    sha256: str | None = None
    """The large-file digest, where the hub knows one."""


class FileSet(Protocol):
    """The files that are one model, or one thing beside a model, whole."""

    @property
    def name(self) -> str:
        """Unique among the complete sets of a repository."""
        ...

    @property
    def label(self) -> str:
        """What a person would type to mean this set."""
        ...

    @property
    def kind(self) -> str:
        """What it is: "model", or what else the format knows."""
        ...

    @property
    def files(self) -> Sequence[RepoFile]:
        """In order; the first holds the header."""
        ...

    @property
    def missing(self) -> Sequence[int]:
        """One-based numbers of the files that the listing lacks."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        ...


@dataclass(frozen=True, slots=True)
class ReportLabel:
    """How people read a field of a report."""

    label: str
    unit: Literal["", "bytes"] = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """What some of its values are called."""


class ModelFormat(Protocol):
    """One format of model files; its module ends with `FORMAT: ModelFormat = ...`."""

    kind: str
    report_recipe: str
    """The kind of the recipe that checks a model and writes its report."""

    def owns(self, path: str) -> bool:
        """True for a file of this format, by its name."""
        ...

    def group(self, files: Iterable[RepoFile]) -> Sequence[FileSet]:
        """The sets of a listing, models first; files of other formats are left out."""
        ...

    def select(self, files: Iterable[RepoFile], selector: str | None) -> FileSet:
        """The one complete model that `selector` means, None = the only one.

        Raises `NotFound`, `InvalidSpec` and `InvalidModel`, with the candidates.
        """
        ...

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """What a report says about its model."""
        ...

    def report_fields(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """A report as flat text, to be compared field by field."""
        ...

    def label_of(self, name: str) -> ReportLabel | None:
        """How a field of a report is shown; None = as it is."""
        ...

    def read_template(self, path: Path, tools: Toolbox) -> str | None:
        """The chat template of a model on this disk, read by a limited child."""
        ...

    def difference(self, before: Path, after: Path) -> tuple[str, Sequence[str]]:
        """How two files of this format differ: one sentence, and the tensors. `InvalidModel`."""
        ...
