"""What a model says about itself, as the tables of its format, for the page of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmadmin.core import catalog
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import MmError
from mmadmin.core.formats.protocol import ReportTable
from mmadmin.core.spec.spec import parse_spec

WIDTH, HEIGHT = 300, 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table."""

    text: str
    number: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A table as the page draws it."""

    title: str
    columns: Sequence[tuple[str, bool]]
    """Names, and whether they hold sizes."""
    rows: Sequence[Sequence[tuple[str, Cell]]]
    """Each cell with its column's name."""
    lines: Sequence[tuple[str, str]]
    """Name and path of each line."""
    problem: str


def model_tables(spec_toml: str, report: Mapping[str, Any] | None) -> list[Shown]:
    """The tables of a model's report; none where the deployment file is of another version."""
    if not report:
        return []
    try:
        engine = catalog.engine(parse_spec(spec_toml).engine_kind)
        return [_shown(one) for one in catalog.model_format(engine.model_format).tables(report)]
    except (MmError, KeyError, TypeError, ValueError):  # written by another version
        return []


def _shown(table: ReportTable) -> Shown:
    rows = [[_cell(value) for value in row] for row in table.rows]
    sizes = [cell.number for cell in rows[0]] if rows else [False] * len(table.columns)
    return Shown(
        table.title,
        list(zip(table.columns, sizes, strict=True)),
        [list(zip(table.columns, row, strict=True)) for row in rows],
        [(name, _path(values)) for name, values in table.lines.items()],
        table.problem,
    )


def _cell(value: str | int) -> Cell:
    if isinstance(value, int):
        return Cell(bytes_text(value), number=True)
    return Cell(value, number=False)


def _path(values: Sequence[float]) -> str:
    """A line through the values, the largest at the top; a point for each."""
    most = max((v for v in values if 0 < v < float("inf")), default=1.0)
    step = WIDTH / max(len(values) - 1, 1)
    points = [
        f"{n * step:.1f} {HEIGHT - HEIGHT * min(max(v, 0.0), most) / most:.1f}"
        for n, v in enumerate(values)
        if v == v  # noqa: PLR0124 (not a number is drawn as a gap)
    ]
    return "M" + "L".join(points) if points else ""
