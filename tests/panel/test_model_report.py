"""What a model says about itself, as tables and lines on the page of its generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.template.loader import render_to_string

from deployments.views.model_report import _shown, model_tables
from mmadmin.core.formats.checkpoint.format import FORMAT
from mmadmin.core.formats.protocol import ReportTable

SPEC = Path(__file__).resolve().parents[2] / "deployments" / "catalog" / "smollm2-135m.toml"
CHECKPOINT: dict[str, Any] = {
    "modules": {
        "model.layers.*.mlp.up_proj": {
            "count": 88,
            "bytes": 31 << 30,
            "types": {"BF16": 1, "I32": 2},
            "tensors": ["weight_packed"],
        }
    },
    "cache_scales": {
        "problem": "all 3 k scales are 1.0: they were never calibrated",
        "k": {"count": 3, "least": "1", "most": "1", "values": ["1", "1", "1"]},
        "v": {"count": 3, "least": "0.5", "most": "2", "values": ["0.5", "2", "nan"]},
    },
    "effects": {"tekken.json": "another tokenizer"},
}


def test_a_report_is_read_by_the_format_of_its_engine() -> None:
    """Bytes by type of a GGUF; nothing where there is no report or it is of another version."""
    (table,) = model_tables(SPEC.read_text(), {"tensor_types": {"Q4_1": 3 << 20}})
    assert [[cell.text for _name, cell in row] for row in table.rows] == [["Q4_1", "3.0 MiB"]]
    assert table.columns == [("Type", False), ("Size", True)]
    assert model_tables(SPEC.read_text(), None) == []
    assert model_tables("name = 1", {"tensor_types": {}}) == []
    assert model_tables(SPEC.read_text(), {"tensor_types": {"Q4_1": "many"}}) == []


def test_modules_scales_and_files_of_a_checkpoint() -> None:
    """Modules with sizes, a line for each kind of scale, what is wrong, and files with an effect."""
    tables = [_shown(one) for one in FORMAT.tables(CHECKPOINT)]
    assert [one.title for one in tables][:2] == ["Modules", "K/V cache scales"]
    html = render_to_string("deployment/_model.html", {"model_tables": tables})
    for text in ("up_proj", "31.0 GiB", "BF16, I32", "never calibrated", "tekken.json"):
        assert text in html
    assert html.count("<path") == 2
    assert dict(tables[1].lines)["V"] == "M0.0 45.0L150.0 0.0"


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf"), 1.0], [-1.0]])
def test_unsound_numbers_are_drawn_all_the_same(values: list[float]) -> None:
    """The picture of a bad report never breaks the page."""
    table = ReportTable("t", ("a",), [("b",)], {"x": values})
    assert "inf" not in _shown(table).lines[0][1]
