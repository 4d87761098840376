"""An exported history, read back: what is needed to make a generation again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmadmin.core.build.derivation import graph_to_json
from mmadmin.core.errors import (
    Conflict,
    DigestMismatch,
    InvalidInput,
    MmError,
    NotFound,
    SourceMissing,
    Unauthorized,
)
from mmadmin.core.generations.history_file import ELSEWHERE, only_the_same, recorded_generation
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.spec import parse_spec
from tests.core.generations.test_diff import SMALL
from tests.core.spec.test_assemble import LAPTOP, SMALL_LOCK

SYSTEM = f"{'a' * 64}-smollm2-135m"
GOAL = assemble(parse_spec(SMALL), SMALL_LOCK, LAPTOP)


def written(**other: Any) -> str:
    """A history with one built generation and one that failed."""
    built = {"number": 1, "state": "live", "system": SYSTEM, "graph": graph_to_json(GOAL)}
    failed = {"number": 2, "state": "failed", "system": "", "graph": None}
    data = {"format": 1, "deployment": {"name": "smol"}, "generations": [built, failed]}
    return json.dumps(data | other)


@pytest.mark.parametrize("version", [1, 2])
def test_a_generation_is_read_back_with_all_its_steps(version: int) -> None:
    """The very derivations that were recorded, and what they came out as."""
    found = recorded_generation(written(format=version), 1, "h.json")
    assert (found.uid, found.system) == ("smol/1", SYSTEM)
    assert found.goal == GOAL
    assert found.fields["state"] == "live"


@pytest.mark.parametrize(
    ("text", "number", "kind", "words"),
    [
        (written(), 3, NotFound, "h.json has no generation 3 of smol"),
        (written(), 2, Conflict, "smol/2 was never built: it is failed"),
        (written(format=3), 1, InvalidInput, "has format 3, this version reads 1 to 2"),
        (written(deployment=None), 1, InvalidInput, "is not an exported history"),
        ("{}", 1, InvalidInput, "is not an exported history"),
        ("[]", 1, InvalidInput, "is not an exported history"),
        ("name = 1", 1, InvalidInput, "is not an exported history"),
    ],
)
def test_what_cannot_be_read_is_said(
    text: str, number: int, kind: type[MmError], words: str
) -> None:
    """Another number, another format, another file: each in words."""
    with pytest.raises(kind, match=words):
        recorded_generation(text, number, "h.json")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (SourceMissing("gone", remedy="look again"), ELSEWHERE),
        (DigestMismatch("changed", remedy="update the lock"), ELSEWHERE),
        (Unauthorized("no", remedy="set HF_TOKEN"), f"{ELSEWHERE}; set HF_TOKEN"),
        (Conflict("other", remedy="as it is"), "as it is"),
    ],
)
def test_a_source_that_vanished_or_changed_has_a_remedy_of_its_own(
    error: MmError, remedy: str
) -> None:
    """A new lock would make something else; what may pass keeps its own advice too."""
    with pytest.raises(type(error)) as raised, only_the_same():
        raise error
    assert raised.value.remedy == remedy
