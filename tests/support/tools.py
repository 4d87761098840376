"""A recipe's hands in tests: the real host toolbox on a bare folder, or one that runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.build.recipe import ChildLimits, Growing, Json, LineHook, Recipe, Source
from mmadmin.core.errors import InvalidDerivation
from mmadmin.host.policy import Policy
from mmadmin.host.toolbox import HostConfig, HostToolbox

QUICK = Policy(segment_bytes=1 << 16, backoff_s=0.01, stall_s=2.0, attempts=4)


@dataclass
class BareStaging:
    """An attempt folder without a store behind it."""

    folder: Path
    inherit: Sequence[int] = ()
    reserved: int = 0
    blobs: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True)
        self.scratch.mkdir()

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def reserve(self, size_bytes: int) -> None:
        self.reserved += size_bytes

    def take(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        blob = self.blobs.get(sha256)
        if blob is None or blob.stat().st_size != size:
            return False
        to.hardlink_to(blob)
        return True

    def keep(self, path: Path, sha256: str) -> None:
        blob = self.folder / f"blob-{sha256}"
        blob.hardlink_to(path)
        self.blobs[sha256] = blob


@dataclass
class Attempt:
    """One attempt at a recipe with the real toolbox."""

    staging: BareStaging
    tools: HostToolbox
    lines: list[str]
    progress: list[tuple[int, int, str]]

    @property
    def out(self) -> Path:
        return self.staging.out

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def build(self, recipe: Recipe, params: dict[str, Json], **inputs: Path) -> Path:
        recipe.check(params)
        recipe.build(params, inputs, self.out, self.tools)
        return self.out


def attempt(folder: Path, **config: object) -> Attempt:
    """A fresh attempt below `folder`."""
    staging = BareStaging(
        folder / f"attempt-{len(list(folder.iterdir())) if folder.exists() else 0}"
    )
    lines: list[str] = []
    progress: list[tuple[int, int, str]] = []
    options = {"downloads": folder / "downloads", "policy": QUICK, "jobs": 2, **config}
    cancelled = options.pop("cancelled", lambda: False)
    tools = HostToolbox(
        staging,
        lines.append,
        lambda done, total, unit: progress.append((done, total, unit)),
        cancelled,  # type: ignore[arg-type]
        config=HostConfig(**options),  # type: ignore[arg-type]
    )
    return Attempt(staging, tools, lines, progress)


@dataclass
class NoTools:
    """Hands that can only log: whatever reaches for more fails."""

    scratch: Path
    jobs: int = 1
    lines: list[str] = field(default_factory=list)
    digests: dict[Path, str] = field(default_factory=dict)
    reserved: int = 0

    def find(self, program: str) -> Path:
        raise InvalidDerivation(f"no {program} in this test")

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
        raise InvalidDerivation(f"{argv} in a test without programs")

    def python(
        self, module: str, request: Json, *, limits: ChildLimits, readable: Sequence[Path] = ()
    ) -> Json:
        raise InvalidDerivation(f"{module} in a test without children")

    def log(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Forget it."""

    def download(self, source: Source, to: Path, sha256: str, size: int) -> None:
        raise InvalidDerivation(f"{source} in a test without downloads")

    def reuse(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        return False

    def reserve(self, size_bytes: int) -> None:
        self.reserved += size_bytes

    def hashed(self, path: Path, sha256: str) -> None:
        self.digests[path] = sha256
