"""What a recipe is, and the hands it is given.

A recipe is the code that performs one kind of step. It may touch the world only through its
`Toolbox`; the host room implements that. `tools.run` is sandboxed, logged, and killed as a whole
group when the job is cancelled or its worker dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]
Params = Mapping[str, Json]

Determinism = Literal["bitwise", "same-platform", "none"]


@dataclass(frozen=True, slots=True)
class FixedFile:
    """One file of an output whose content is known beforehand."""

    path: str
    """Relative POSIX path inside the object."""
    sha256: str
    size: int
    """Bytes."""
    executable: bool = False


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository at a 40-hex commit."""

    repo: str
    revision: str
    path: str


@dataclass(frozen=True, slots=True)
class IndexSource:
    """A release file (sdist or wheel) of the Python index, by its file name."""

    project: str
    version: str
    filename: str


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A plain HTTP(S) address."""

    url: str
    secret: str = ""
    """Name of the credential that it takes; empty = none."""


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file of this machine."""

    path: str


Source = HubSource | IndexSource | UrlSource | PathSource


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What a child that handles hostile input may use."""

    time_s: int
    memory_bytes: int
    """Address space."""
    output_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Growing:
    """A file that a program writes without telling how far it is."""

    path: Path
    size_bytes: int
    """About how large it becomes."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a step takes of its host; it waits until that is free. Nothing of it is in a key."""

    gpus: int = 0
    """GPUs of its own, or shares of them: see `gpu_memory_bytes`."""
    gpu_memory_bytes: int = 0
    """On each of its GPUs; 0 = the whole GPU."""
    memory_bytes: int = 0
    """Main memory that must be free when it starts."""
    disk_bytes: int = 0
    """Room in the store that is promised to it, besides what it reserves itself."""
    time_s: int | None = None
    """How long one of its programs may run; None = the host's usual limit."""
    silence_s: int | None = None
    """How long one of them may print nothing; None = the host's usual limit."""


class Toolbox(Protocol):
    """All that a recipe can do to the host. Methods raise `Cancelled` once the job is cancelled."""

    @property
    def scratch(self) -> Path:
        """A private folder of this attempt, on the store's file system, removed afterwards."""
        ...

    @property
    def jobs(self) -> int:
        """How many compile jobs may run; never part of a derivation."""
        ...

    def find(self, program: str) -> Path:
        """The absolute path of a program; raises `ToolMissing` with the package to install."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        writable: Sequence[Path] = (),
        on_line: LineHook | None = None,
        grows: Growing | None = None,
    ) -> None:
        """Run a program to its end: sandboxed, without network, output to the log line by line.

        `writable` names folders besides `scratch` and the output that it may write. `grows` is a
        file that it writes, whose size is shown as progress.
        Raises `StepFailed` with exit code and the last lines; `DiskFull` when that is why.
        """
        ...

    def log(self, line: str) -> None:
        """Add a line to the step's log."""
        ...

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the step is; cheap enough to be called often."""
        ...

    def download(self, source: Source, to: Path, sha256: str, size: int) -> None:
        """Fetch a file by its digest (fetch recipes only): resumes, verifies, hashes once.

        Raises `DigestMismatch`, `SourceUnavailable` and its kinds, `DiskFull`.
        """
        ...

    def reuse(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """Link an output file whose bytes the store has to `to`; False when it has not.

        It is shared with the store: it must not be written to.
        """
        ...

    def reserve(self, size_bytes: int) -> None:
        """Reserve room on the store's disk for what the step will write; raises `DiskFull`."""
        ...

    def hashed(self, path: Path, sha256: str) -> None:
        """Hand on the digest of an output file whose bytes were all read just now.

        The store takes it over instead of reading a large file once more.
        """
        ...

    def python(
        self,
        module: str,
        request: Json,
        *,
        limits: ChildLimits,
        readable: Sequence[Path] = (),
    ) -> Json:
        """Run `python -m module` as a limited, sandboxed child: JSON in, JSON out.

        For untrusted bytes and templates. Raises `StepFailed` when the child
        dies, hangs or outgrows its limits; its details carry `exit_code` and `log_tail`.
        """
        ...


class LineHook(Protocol):
    """Sees each output line of a program, to turn it into progress."""

    def __call__(self, line: str) -> None:
        """Take one line, without its line end."""
        ...


class Recipe(Protocol):
    """One kind of build step; its module ends with `RECIPE: Recipe = ...`."""

    kind: str
    """"patch-template" lives in `patch_template.py`."""
    version: int
    """Part of the derivation; raised when the output changes for the same params."""
    determinism: Determinism
    refers_to_inputs: bool
    """True when the output names its inputs by store path (a system), so that they live on."""
    copies: Sequence[str]
    """Inputs whose bytes the output holds once more, so that a plan knows what it will write."""

    def check(self, params: Params) -> None:
        """Refuse bad params (`InvalidDerivation`)."""
        ...

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """The output's files where they are pinned by digest, else None."""
        ...

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Fill the empty folder `out`. Inputs are object folders, read-only.

        Must not write outside `out` and `tools.scratch`; raises an `MmError` on failure.
        """
        ...


@runtime_checkable
class Requiring(Protocol):
    """A recipe whose steps need GPUs, much memory or other limits than usual."""

    def requires(self, params: Params) -> Requirements:
        """What one step with these params takes."""
        ...
