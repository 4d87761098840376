"""What an engine asks a lock to pin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mmadmin.core.build.recipe import Json
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.spec.origin import Origin

Choose = Callable[[Sequence[RepoFile]], Sequence[str]]
"""Paths of a listing that are wanted, in order. Raises `InvalidSpec` and `NotFound`."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Python packages that are installed together, as wheels for the host's interpreter."""

    requirements: tuple[str, ...]
    """PEP 508; the lock pins them with everything that they need."""
    overrides: tuple[str, ...] = ()
    """PEP 508; each replaces what the packages themselves require of a name.

    `name ; sys_platform == "never"` leaves it out.
    """


@dataclass(frozen=True, slots=True)
class PinRequest:
    """One list of files that the lock shall hold."""

    name: str
    """Of the list in the lock."""
    part: str
    """Requests of one part are answered and kept together."""
    question: Mapping[str, Json]
    """What the part asks the world for; while it stays the same, its pins do."""
    origin: Origin | None
    """None = nothing is wanted, which is an answer too."""
    field: str
    """The field of the deployment file that a refusal names."""
    choose: Choose | None = None
    """From a hub's listing, or from the files beside a path; None = the one file of the origin."""
    archive: Literal["wheel", "sdist"] = "wheel"
    """Which kind of release file is wanted of the Python index."""
    saved_as: str = ""
    """The file's name in the lock; empty = the one that it has."""
    model_format: str = ""
    """Of a model that may bring a chat template."""
    packages: Packages | None = None
    """A Python environment; its wheels come from the Python index, whatever the origin is."""

    @property
    def reads_host(self) -> bool:
        """True for files of the host, whose bytes may change at any time."""
        return self.origin is not None and self.origin.source == "path"
