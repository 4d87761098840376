"""What a model format is: which files are one model, and what they say about it. Data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

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


Open = Callable[[RepoFile], BinaryIO]
"""Opens a file of a repository as a stream that fetches what is read."""


class ModelHeader(Protocol):
    """What a header says of every model; the rest is for engines of the format."""

    @property
    def architecture(self) -> str:
        """As the format names it."""
        ...

    @property
    def context_train(self) -> int:
        """Tokens that it was trained with; 0 = not said."""
        ...

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        ...


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
    def quant(self) -> str | None:
        """The quantisation that its name says; None = it says none."""
        ...

    @property
    def shards(self) -> int:
        """How many files it must have."""
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


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A part of a report as a table, for people."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int]]
    """Texts, and sizes in bytes."""
    lines: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that are drawn, one for each layer, by their name."""
    problem: str = ""
    """What is wrong with it."""


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

    def attachment(self, files: Iterable[RepoFile], model: FileSet) -> str | None:
        """The file that is loaded beside a model for other kinds of input; None = there is none."""
        ...

    def read_header(self, path: Path) -> ModelHeader:
        """The header of a model on this disk; any of its files stands for the set.

        Raises `InvalidModel`, `OSError`.
        """
        ...

    def read_remote(self, chosen: FileSet, open_file: Open) -> ModelHeader:
        """The header of a set elsewhere. Raises `InvalidModel`, and what the streams raise."""
        ...

    def read_remote_template(self, chosen: FileSet, open_file: Open) -> str | None:
        """The chat template of a set elsewhere; None = it has none. Raises as `read_remote`."""
        ...

    def scaled(self, header: Any, wanted: FileSet, read: FileSet) -> ModelHeader:
        """The header that `wanted` has, judged by that of `read`, another quant of the model."""
        ...

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """What a report says about its model."""
        ...

    def report_fields(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """A report as flat text, to be compared field by field."""
        ...

    def tables(self, report: Mapping[str, Any]) -> Sequence[ReportTable]:
        """A report for its page: what lies in the model's files."""
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
