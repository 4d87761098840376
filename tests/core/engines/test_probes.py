"""Probe reports as records."""

from __future__ import annotations

from mmadmin.core.engines.probes import ProbeReport, ProbeRow, report_rows


def test_the_rows_of_a_report_come_back_from_its_record() -> None:
    """As they were."""
    rows = (
        ProbeRow("identity", "passed", "process 1 serves chat", required=True),
        ProbeRow("speed", "failed", "too slow", required=False, ms=7),
    )
    assert report_rows(ProbeReport(rows, {}, {}).as_json()) == list(rows)
    assert report_rows(None) == []


def test_a_report_of_the_first_version_is_read() -> None:
    """It calls the message `words`."""
    row = {"name": "speed", "state": "passed", "words": "9 a second", "required": True, "ms": 3}
    assert report_rows({"format": 1, "rows": [row]}) == [
        ProbeRow("speed", "passed", "9 a second", required=True, ms=3)
    ]
