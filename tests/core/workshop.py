"""Tiny recipes, tools and graphs for tests of the store, the planner and the builder."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe
from mmadmin.core.errors import InvalidDerivation
from mmadmin.core.store import Staging, Store, StoreObject


class Tools:
    """Hands that do nothing; `on_build` is what tests hook into."""

    def __init__(self, staging: Staging | None = None) -> None:
        self.staging = staging
        self.known: Mapping[str, str] = {}
        self.sandbox_level = "none"


@dataclass
class Write:
    """Writes `text` and what it read from its inputs; counts how often it ran."""

    kind: str = "write"
    version: int = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs: bool = False
    copies: Sequence[str] = ("shards",)
    ran: list[str] = field(default_factory=list)
    hook: Callable[[], None] = lambda: None

    def check(self, params: Params) -> None:
        """Refuse what the recipe cannot use."""
        if "text" not in params:
            raise InvalidDerivation("text is missing")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """What is pinned, if anything."""
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Any) -> None:
        """Write the output."""
        self.ran.append(str(params["text"]))
        self.hook()
        read = [(path / "text").read_text() for path in inputs.values()]
        if params.get("drop_inputs"):
            read = []
        (out / "text").write_text(f"{params['text']}\n" + "".join(read))


@dataclass
class Pinned:
    """Its one file `text` is pinned by digest; writes `serve` (what the source gives)."""

    kind: str = "pinned"
    version: int = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs: bool = False
    copies: Sequence[str] = ()
    ran: list[str] = field(default_factory=list)

    def check(self, params: Params) -> None:
        """Refuse what the recipe cannot use."""

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """What is pinned, if anything."""
        return [FixedFile("text", str(params["sha256"]), int(str(params["size"])))]

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Any) -> None:
        """Write the output."""
        self.ran.append(str(params["serve"]))
        (out / "text").write_text(str(params["serve"]))


@dataclass
class Links(Write):
    """Names its inputs by store path, as a system does."""

    kind: str = "links"
    refers_to_inputs: bool = True
    copies: Sequence[str] = ()

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Any) -> None:
        """Write the output."""
        self.ran.append(str(params["text"]))
        (out / "text").write_text("".join(f"{path.name}\n" for path in inputs.values()))


class Shop:
    """The recipes of one test, and the derivations that use them."""

    def __init__(self) -> None:
        self.write = Write()
        self.pinned = Pinned()
        self.links = Links()
        self._recipes: dict[str, Recipe] = {
            "write": self.write,
            "pinned": self.pinned,
            "links": self.links,
        }

    def recipe_of(self, kind: str) -> Recipe:
        """The recipe of a kind."""
        return self._recipes[kind]

    @property
    def ran(self) -> list[str]:
        """What was really built, in order a recipe."""
        return self.write.ran + self.pinned.ran + self.links.ran


def step(
    text: str, /, *, drop: bool = False, recipe: str = "write", **inputs: Derivation
) -> Derivation:
    """A derivation called like its text."""
    params: dict[str, Any] = {"text": text}
    if drop:
        params["drop_inputs"] = True
    return Derivation(text, recipe, 1, params, inputs)


def pin(name: str, content: str, *, serve: str | None = None) -> Derivation:
    """A derivation whose content is pinned; `serve` is what its source really gives."""
    data = content.encode()
    params: dict[str, Any] = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "serve": content if serve is None else serve,
    }
    return Derivation(name, "pinned", 1, params)


def tools_for(derivation: Derivation, staging: Staging, log: Path) -> Any:
    """Hands for any step."""
    return Tools(staging)


class Watch:
    """An observer that keeps what it saw."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.whys: dict[str, str] = {}

    def step_started(self, derivation: Derivation, why: str) -> None:
        """Keep it."""
        self.events.append(("started", derivation.name))
        self.whys[derivation.name] = why

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Keep who it was, once."""
        if ("waiting", holder) not in self.events:
            self.events.append(("waiting", holder))

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """Keep it."""
        self.events.append(("cached", derivation.name))

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:
        """Keep it."""
        self.events.append(("built", derivation.name))

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """Keep it."""
        self.events.append(("failed", derivation.name))

    def names(self, event: str) -> list[str]:
        """Names of the steps that the event was seen for."""
        return [name for kind, name in self.events if kind == event]


def add(
    store: Store, name: str, files: Mapping[str, bytes | str], *, refs: Sequence[str] = ()
) -> StoreObject:
    """Seal an object with these files; a `str` is a link's target, a name with `*` is executable."""
    with store.lease("test") as lease, store.staging(lease) as staging:
        for path, content in files.items():
            target = staging.out / path.removesuffix("*")
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                target.symlink_to(content)
            else:
                target.write_bytes(content)
                target.chmod(0o755 if path.endswith("*") else 0o644)
        return store.seal(staging, name, refs=refs)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killer(step: str, nth: int = 1) -> Callable[[str], None]:
    """A step hook that ends the process by SIGKILL when the step is done the nth time."""
    seen = 0

    def after(done: str) -> None:
        nonlocal seen
        seen += done == step
        if done == step and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return after


def damage(store: Store) -> list[str]:
    """What is wrong with a store: every object must be complete or absent."""
    wrong = []
    for found in store.objects():
        if not found.path.is_dir():
            wrong.append(f"{found.name}: no path")
            continue
        for entry in found.files:
            path = found.path / entry.path
            if entry.kind == "file":
                if hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
                    wrong.append(f"{found.name}/{entry.path}: bytes")
                blob = store.blob_path(entry.sha256, executable=entry.executable)
                if not blob.exists() or not blob.samefile(path):
                    wrong.append(f"{found.name}/{entry.path}: not its blob")
                mode = path.stat().st_mode & 0o7777
                if mode != (0o555 if entry.executable else 0o444) or path.stat().st_mtime != 1:
                    wrong.append(f"{found.name}/{entry.path}: mode or time")
            elif entry.kind == "dir" and path.stat().st_mode & 0o7777 != 0o555:
                wrong.append(f"{found.name}/{entry.path}: folder mode")
        if found.path.stat().st_mode & 0o7777 != 0o555 or found.path.stat().st_mtime != 1:
            wrong.append(f"{found.name}: mode or time")
    wrong += [
        f"blob {blob.name}: bytes"
        for blob in store.layout.blobs.glob("*/*")
        if hashlib.sha256(blob.read_bytes()).hexdigest() != blob.name[:64]
    ]
    return wrong
