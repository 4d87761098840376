"""An exported history: what is needed of it to have a generation again on another machine.

`mm history NAME --export FILE` writes it, `deployments.schemas.history_document` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmadmin.core.build.derivation import Derivation, graph_from_json
from mmadmin.core.errors import (
    Conflict,
    DigestMismatch,
    InvalidInput,
    MmError,
    NotFound,
    SourceMissing,
    SourceUnavailable,
)

HISTORY_FORMAT = 2
READABLE = (1, HISTORY_FORMAT)
"""Format 1 had other names for times; what is read here is the same in both."""


@dataclass(frozen=True, slots=True)
class RecordedGeneration:
    """One generation of an exported history."""

    name: str
    number: int
    goal: Derivation
    """What it was made of, down to the pinned sources."""
    system: str
    """The object that it came out as."""
    fields: Mapping[str, Any]
    """Everything that the history says of it."""

    @property
    def uid(self) -> str:
        """`<deployment>/<number>`."""
        return f"{self.name}/{self.number}"


def recorded_generation(text: str, number: int, where: str) -> RecordedGeneration:
    """A generation of an exported history; `where` names the file in messages.

    Raises `InvalidInput`, `NotFound`, and `Conflict` for one that never was built.
    """
    try:
        data: Any = json.loads(text)
        if data["format"] not in READABLE:
            raise InvalidInput(
                f"{where} has format {data['format']!r}, this version reads 1 to {HISTORY_FORMAT}",
                remedy="export it again with this version",
            )
        name = str(data["deployment"]["name"])
        found = {row["number"]: row for row in data["generations"]}
        row = found.get(number)
        if row is None:
            raise NotFound(
                f"{where} has no generation {number} of {name}",
                remedy=f"it has {', '.join(map(str, found)) or 'none'}",
            )
        if not row["system"] or row["graph"] is None:
            raise Conflict(
                f"{name}/{number} was never built: it is {row['state']}",
                remedy="its deployment file is in the history: deploy that",
            )
        return RecordedGeneration(
            name, number, graph_from_json(row["graph"]), str(row["system"]), row
        )
    except MmError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{where} is not an exported history, or is damaged: {error!r}",
            remedy="write one with `mm history NAME --export FILE`",
        ) from error


ELSEWHERE = (
    "what was pinned must come from where it still is: push it to a binary cache there "
    "(mm store push), "
    "or take the generation along whole (mm export, mm import)"
)


@contextmanager
def only_the_same() -> Iterator[None]:
    """While bytes are made again: a source that vanished or changed has a remedy of its own.

    A new lock would make something else of the generation.
    """
    try:
        yield
    except (SourceUnavailable, DigestMismatch) as error:
        error.remedy = f"{ELSEWHERE}; {error.remedy}" if _may_pass(error) else ELSEWHERE
        raise


def _may_pass(error: MmError) -> bool:
    """True where asking again, or with other credentials, may help."""
    return isinstance(error, SourceUnavailable) and not isinstance(error, SourceMissing)
