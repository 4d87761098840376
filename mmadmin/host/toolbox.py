"""What a recipe is given on this host: programs, downloads, limits, log.

One `HostToolbox` serves one attempt at one derivation. Programs run inside the sandbox and end with
the attempt; what a step may use is limited by the host's configuration, never by the derivation.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmadmin.core.build.recipe import (
    ChildLimits,
    Growing,
    Json,
    LineHook,
    Requirements,
    Source,
)
from mmadmin.core.callbacks import Report
from mmadmin.core.engines.protocol import visible_gpus
from mmadmin.core.errors import (
    Cancelled,
    InvalidInput,
    StepFailed,
)
from mmadmin.core.fit.facts import GpuFacts
from mmadmin.core.fit.placement import Running
from mmadmin.host import compiler, process
from mmadmin.host.facts import gpu_nodes
from mmadmin.host.gpu_leases import Granted, hold
from mmadmin.host.policy import Policy
from mmadmin.host.process import Limits
from mmadmin.host.sandbox import Level, Sandbox, environment, level_from
from mmadmin.host.source_guard import Guard

if TYPE_CHECKING:
    from mmadmin.host.hub import Hub

STEP_LIMITS = Limits(time_s=24 * 3600, silence_s=2 * 3600, log_bytes=64 << 20)
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package `mmadmin`."""


class Staging(Protocol):
    """A private attempt folder, as the store gives it."""

    @property
    def out(self) -> Path:
        """The output folder that the recipe fills."""
        ...

    @property
    def scratch(self) -> Path:
        """A folder that vanishes with the attempt."""
        ...

    @property
    def inherit(self) -> Sequence[int]:
        """Descriptors of locks that stay held until the step's last process is gone."""
        ...

    def reserve(self, size_bytes: int) -> None:
        """Promise room in the store until the attempt ends; raises `DiskFull`."""
        ...

    def take(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """Link a file that the store has already to `to`; False when it has not."""
        ...

    def keep(self, path: Path, sha256: str) -> None:
        """Link a fetched file into the store, whatever becomes of this attempt."""
        ...


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What the host allows a step; nothing of it enters a derivation."""

    downloads: Path
    """The store's `downloads/`."""
    sandbox: str = "auto"
    jobs: int = 1
    limits: Limits = STEP_LIMITS
    """For programs that a recipe runs."""
    hidden: Sequence[Path] = ()
    """Folders that no step's program may see (secrets)."""
    policy: Policy = Policy()  # noqa: RUF009 (frozen)
    hub: Hub | None = None
    guard: Guard = Guard()  # noqa: RUF009 (frozen)
    """What the asker may take from where."""
    set_here: frozenset[str] = frozenset()
    """Limits that this host sets itself: they hold for every recipe."""
    starting: Callable[[], Sequence[Running]] = tuple
    """Engines that have been given GPU memory and still load."""

    @classmethod
    def from_env(
        cls,
        downloads: Path,
        env: Mapping[str, str] | None = None,
        *,
        hidden: Sequence[Path] = (),
        guard: Guard = Guard(),  # noqa: B008 (frozen)
    ) -> HostConfig:
        """Read `MM_SANDBOX`, `MM_JOBS` and the step limits from the environment.

        A time or silence limit that is set holds for every recipe; else a recipe may have its own.

        `MM_STEP_TIME_S`, `MM_STEP_SILENCE_S`, `MM_STEP_LOG_BYTES`, `MM_STEP_MEMORY_BYTES`;
        0 = no limit.
        """
        env = os.environ if env is None else env
        plain = STEP_LIMITS
        names = {"time_s": "MM_STEP_TIME_S", "silence_s": "MM_STEP_SILENCE_S"}
        return cls(
            downloads=downloads,
            sandbox=env.get("MM_SANDBOX") or "auto",
            jobs=_number(env, "MM_JOBS", len(os.sched_getaffinity(0))),
            limits=Limits(
                time_s=_number(env, "MM_STEP_TIME_S", int(plain.time_s)),
                silence_s=_number(env, "MM_STEP_SILENCE_S", int(plain.silence_s)),
                log_bytes=_number(env, "MM_STEP_LOG_BYTES", plain.log_bytes),
                memory_bytes=_number(env, "MM_STEP_MEMORY_BYTES", plain.memory_bytes),
            ),
            hidden=hidden,
            guard=guard,
            set_here=frozenset(name for name, setting in names.items() if env.get(setting)),
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise InvalidInput(f"{name} is {text!r}", remedy="give a whole number")
    return int(text)


def _gpu_environment(gpus: Sequence[GpuFacts]) -> Mapping[str, str]:
    """Shows a CUDA program the step's GPUs alone, numbered from 0."""
    return visible_gpus([gpu.index for gpu in gpus], [gpu.uuid for gpu in gpus])


@dataclass(slots=True)
class HostToolbox:
    """`mmadmin.core.build.recipe.Toolbox` on this host."""

    staging: Staging
    log_sink: Callable[[str], None]
    progress_sink: Callable[[int, int, str], None]
    cancelled: Callable[[], bool]
    config: HostConfig = field(kw_only=True)
    known: dict[str, str] = field(default_factory=dict, init=False)
    """Output files hashed while written or read: relative path → sha256."""
    sandbox_level: Level = field(default="none", init=False)
    _planned: int = field(default=0, init=False)
    """Bytes that were reserved: what all downloads of a fetch come to."""
    _fetched: int = field(default=0, init=False)
    _limits: Limits = field(init=False)
    _granted: Granted = field(default=Granted(), init=False)

    def __post_init__(self) -> None:
        self.sandbox_level = level_from(self.config.sandbox)
        self._limits = self.config.limits

    @contextmanager
    def holding(self, wanted: Requirements, owner: str, on_wait: Report) -> Iterator[None]:
        """Hold what the step requires; see `StepTools`."""
        if wanted.disk_bytes:
            self.staging.reserve(wanted.disk_bytes)
        own = {"time_s": wanted.time_s, "silence_s": wanted.silence_s}
        asked = {k: v for k, v in own.items() if v is not None and k not in self.config.set_here}
        self._limits = replace(self.config.limits, **asked)
        with hold(
            self.config.downloads.parent,
            wanted,
            owner,
            starting=self.config.starting,
            check=self._check,
            on_wait=on_wait,
        ) as self._granted:
            if held := ", ".join(str(gpu.index) for gpu in self._granted.gpus):
                self.log(f"it has GPU {held}")
            yield

    @property
    def scratch(self) -> Path:
        """The attempt's private folder."""
        return self.staging.scratch

    @property
    def jobs(self) -> int:
        """Compile jobs that this host allows."""
        return self.config.jobs

    def find(self, program: str) -> Path:
        """The absolute path of a program; raises `ToolMissing`."""
        self._check()
        return compiler.find(program)

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
        """Run a program to its end inside the sandbox; see the protocol."""
        self._check()
        where = cwd or self.scratch
        writes = (self.scratch, self.staging.out, *writable)
        gpus = self._granted.gpus
        nodes = gpu_nodes([gpu.index for gpu in gpus]) if gpus else ()
        sandbox = replace(self._sandbox(writes), devices=nodes)

        def hand_on(line: str) -> None:
            self.log_sink(line)
            if on_line is not None:
                on_line(line)

        def cancelled() -> bool:  # asked several times a second
            if grows is not None and grows.path.exists():
                size = grows.path.stat().st_size
                self.progress_sink(min(size, grows.size_bytes), grows.size_bytes, "bytes")
            return self.cancelled()

        process.run(
            sandbox.wrap(list(map(str, argv)), cwd=where),
            cwd=where,
            env=environment(self.scratch, {**_gpu_environment(gpus), **(env or {})}),
            on_line=hand_on,
            cancelled=cancelled,
            limits=self._limits,
            inherit_fds=[*self.staging.inherit, *self._granted.inherit],
            may_fill=writes,
            name=Path(argv[0]).name,
        )

    def python(
        self,
        module: str,
        request: Json,
        *,
        limits: ChildLimits,
        readable: Sequence[Path] = (),
    ) -> Json:
        """Run `python -m module REQUEST ANSWER` as a limited child; see the protocol."""
        self._check()
        folder = self.scratch / f"child-{os.urandom(6).hex()}"
        folder.mkdir()
        asked, answered = folder / "request.json", folder / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        argv = [sys.executable, "-P", "-m", module, str(asked), str(answered)]
        sandbox = self._sandbox((folder,), visible=readable)
        try:
            process.run(
                sandbox.wrap(argv, cwd=folder),
                cwd=folder,
                env=environment(folder, {"PYTHONPATH": str(PACKAGE_ROOT)}),
                on_line=self.log_sink,
                cancelled=self.cancelled,
                limits=Limits(
                    time_s=limits.time_s,
                    cpu_s=limits.time_s,
                    address_space_bytes=limits.memory_bytes,
                    file_bytes=limits.output_bytes,
                    log_bytes=limits.output_bytes,
                ),
                name=module.rpartition(".")[2],
            )
            answer: Json = json.loads(answered.read_bytes())
        except (OSError, ValueError) as error:
            raise StepFailed(
                f"{module} gave no answer", remedy="this is a bug: please report it"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return answer

    def log(self, line: str) -> None:
        """Add a line to the step's log."""
        self.log_sink(line)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the step is; notices a cancellation."""
        self._check()
        self.progress_sink(done, total, unit)

    def download(self, source: Source, to: Path, sha256: str, size: int) -> None:
        """Fetch a file by its digest; see the protocol."""
        self._check()
        if self.staging.take(sha256, size, to):
            self.log(f"{to.name}: the store has these bytes already")
        else:
            self._bring(source, to, sha256, size)
            if to.stat().st_nlink == 1:
                # Into the store at once: another file's failure must not cost this one.
                self.staging.keep(to, sha256)
        self._fetched += size
        self._show(0, 0)
        self.hashed(to, sha256)

    def _show(self, done: int, total: int) -> None:
        """Progress over all files of the fetch, not of each by itself."""
        in_all = max(self._planned, self._fetched + total)
        self.progress_sink(self._fetched + done, in_all, "bytes")

    def _bring(self, source: Source, to: Path, sha256: str, size: int) -> None:
        from mmadmin.host.sources import Fetcher  # noqa: PLC0415 (see there)

        fetcher = Fetcher(
            downloads=self.config.downloads,
            policy=self.config.policy,
            hub=self.config.hub,
            progress=self._show,
            cancelled=self.cancelled,
            log=self.log,
            already=self.staging.take,
            guard=self.config.guard,
        )
        fetcher.bring(source, to, sha256, size)

    def reuse(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """Link an output file that the store has already; see the protocol."""
        if not self.staging.take(sha256, size, to, executable=executable):
            return False
        self.hashed(to, sha256)
        return True

    def reserve(self, size_bytes: int) -> None:
        """Reserve room on the store's disk; raises `DiskFull`."""
        self._check()
        self._planned += size_bytes
        self.staging.reserve(size_bytes)

    def hashed(self, path: Path, sha256: str) -> None:
        """Note the digest of an output file; others (scratch) are of no interest."""
        if path.is_relative_to(self.staging.out):
            self.known[path.relative_to(self.staging.out).as_posix()] = sha256

    def _check(self) -> None:
        if self.cancelled():
            raise Cancelled("the step was cancelled")

    def _sandbox(self, writable: Sequence[Path], visible: Sequence[Path] = ()) -> Sandbox:
        return Sandbox(
            self.sandbox_level, writable=writable, hidden=self.config.hidden, visible=visible
        )
