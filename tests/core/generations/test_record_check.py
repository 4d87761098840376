"""A record from elsewhere is taken over only when each field has its type."""

from __future__ import annotations

from typing import Any

import pytest

from mmadmin.core.build.derivation import graph_to_json
from mmadmin.core.errors import InvalidInput
from mmadmin.core.generations.record_check import CHECKS, check_record
from mmadmin.core.spec.lock import lock_as_json
from tests.core.generations.test_diff import SMALL
from tests.core.generations.test_history_file import GOAL
from tests.core.spec.test_assemble import LAPTOP, SMALL_LOCK

RECORD: dict[str, Any] = {
    "name": "smol",
    "number": 1,
    "author": "bob",
    "reason": "",
    "spec_toml": SMALL,
    "lock": lock_as_json(SMALL_LOCK),
    "graph": graph_to_json(GOAL),
    "size_bytes": 1,
    "host_facts": LAPTOP.as_json(),
    "command": ["llama-server", "--port", "0"],
    "template": "{{ messages }}",
    "rendering": {"format": 1, "changes": [], "rows": {}},
    "model_report": {"architecture": "llama"},
    "renders": {"plain": {"output": "hello"}, "tools": {"error": "no tools"}},
}
NULLABLE = {"host_facts", "command", "template", "rendering", "model_report", "renders"}


def test_a_record_as_it_is_exported_is_accepted() -> None:
    """With everything known, and with what an older version did not know."""
    assert RECORD.keys() == CHECKS.keys()
    check_record(RECORD, "D")
    check_record({**RECORD, **dict.fromkeys(NULLABLE)}, "D")
    check_record({k: v for k, v in RECORD.items() if k not in NULLABLE}, "D")


@pytest.mark.parametrize("value", [7, -1, True, None, [7], {"a": 7}, 1 << 64], ids=repr)
@pytest.mark.parametrize("field", sorted(CHECKS))
def test_a_field_of_a_wrong_type_is_refused_by_name(field: str, value: Any) -> None:
    """Every field, with every kind of value that JSON has."""
    fits = {"number": value == 7 and value is not True, "size_bytes": value == 7}
    fits |= dict.fromkeys(("host_facts", "rendering", "model_report"), isinstance(value, dict))
    if fits.get(field) or (value is None and field in NULLABLE):
        check_record({**RECORD, field: value}, "D")
        return
    with pytest.raises(InvalidInput, match=field) as refused:
        check_record({**RECORD, field: value}, "D")
    assert refused.value.details["field"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lock", {**RECORD["lock"], "pins": 7}),
        ("lock", {**RECORD["lock"], "format": 99}),
        ("graph", {**RECORD["graph"], "derivations": {}}),
        ("renders", {"plain": {"other": "x"}}),
        ("spec_toml", "name = 7"),
    ],
)
def test_damage_inside_a_field_is_refused(field: str, value: Any) -> None:
    """What is read with a parser later is read with it before it is taken over."""
    with pytest.raises(InvalidInput, match=field):
        check_record({**RECORD, field: value}, "D")
