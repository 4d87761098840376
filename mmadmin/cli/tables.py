"""Tables for people, all of them: what must stay whole stays whole.

On a terminal a table is as wide as that. Words are folded first; then what has a short form is
shortened (the commands take the short form, too); then the least useful columns are left out, and
a line says which. Elsewhere (a pipe, a file) nothing is cut: every value whole, a row one line.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from mmadmin.cli.output import console

GAP = "  "
LEAST_WORDS = 16
"""Cells under which a column of words is not folded."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what may happen to it where the terminal is narrow."""

    heading: str
    whole: bool = False
    """Never broken over lines: ids, names, numbers, times, states."""
    right: bool = False
    """Numbers stand at the right."""
    drop: int = 0
    """Left out where there is no room, the largest first; 0 = never."""
    short: Callable[[str], str] | None = None
    """A short form for where there is no room; the commands take it in the whole one's place."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as lines, and the headings that had no room."""

    lines: tuple[Text, ...]
    left_out: tuple[str, ...] = ()


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print rows under headings; `empty` is said when there are none. Cells may hold markup."""
    found = [list(row) for row in rows]
    if not found:
        console.print(empty)
        return
    shown = layout(columns, found, terminal_width())
    for line in shown.lines:
        console.print(line, soft_wrap=True)
    if shown.left_out:
        console.print(f"[dim]no room for: {', '.join(shown.left_out)}[/]")


def live_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Group:
    """The same for a picture that is redrawn in place."""
    shown = layout(columns, [list(row) for row in rows], terminal_width())
    return Group(*shown.lines)


def terminal_width() -> int | None:
    """Cells of a line; None where the output is not a terminal, whatever colours are forced."""
    return shutil.get_terminal_size().columns if console.file.isatty() else None


def layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Layout:
    """Rows as lines of at most `width` cells, as far as what must stay whole allows; None = any."""
    body = [[Text.from_markup(cell.replace("\t", " ")) for cell in row] for row in rows]
    if width is None:
        body = [[Text("; ").join(cell.split("\n")) for cell in row] for row in body]
        shown = [_Shown(c, [row[n] for row in body]) for n, c in enumerate(columns)]
        return Layout(_lines(shown, [one.natural for one in shown]))
    shown = [_Shown(c, [row[n] for row in body]) for n, c in enumerate(columns)]
    left_out: list[str] = []
    while _least(shown) > width and (narrower := _narrower(shown)):
        kept = [one.column for one in narrower]
        left_out += [one.column.heading for one in shown if one.says and one.column not in kept]
        shown = narrower
    return Layout(_lines(shown, _widths(shown, width)), tuple(h for h in left_out if h))


class _Shown:
    """A column with its cells."""

    def __init__(self, column: Column, cells: Sequence[Text], *, shortened: bool = False) -> None:
        self.column, self.cells, self.shortened = column, cells, shortened
        lines = [line for cell in cells for line in cell.split("\n")]
        self.says = any(line.plain for line in lines)
        self.natural = max(line.cell_len for line in [Text(column.heading), *lines])
        self.least = self.natural if column.whole else min(self.natural, LEAST_WORDS)

    def shorter(self) -> _Shown:
        """The same with the short form of each cell."""
        make = self.column.short
        if make is None:
            return self
        cells = [Text(make(cell.plain), style=cell.style) for cell in self.cells]
        return _Shown(self.column, cells, shortened=True)


def _least(shown: Sequence[_Shown]) -> int:
    return sum(one.least for one in shown) + len(GAP) * (len(shown) - 1)


def _narrower(shown: Sequence[_Shown]) -> list[_Shown]:
    """One step narrower: a column that says nothing goes, then short forms, then what may go."""
    mute = next((one for one in shown if not one.says and one.natural), None)
    if mute is not None:
        return [one for one in shown if one is not mute]
    if any(one.column.short and not one.shortened for one in shown):
        return [one.shorter() for one in shown]
    last = max(shown, key=lambda one: one.column.drop, default=None)
    if last is None or not last.column.drop:
        return []
    return [one for one in shown if one is not last]


def _widths(shown: Sequence[_Shown], width: int) -> list[int]:
    """What there is beyond the least, shared among the columns of words, the narrowest first."""
    widths = [one.least for one in shown]
    for _ in range(width - _least(shown)):
        growing = [n for n, one in enumerate(shown) if widths[n] < one.natural]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def _lines(shown: Sequence[_Shown], widths: Sequence[int]) -> tuple[Text, ...]:
    headings = [[Text(one.column.heading, style="bold")] for one in shown]
    lines = [_joined(shown, widths, headings, 0)]
    for n in range(len(shown[0].cells)):
        cells = [
            _folded(one, one.cells[n], width) for one, width in zip(shown, widths, strict=True)
        ]
        height = max(len(cell) for cell in cells)
        lines += [_joined(shown, widths, cells, part) for part in range(height)]
    return tuple(lines)


def _folded(one: _Shown, cell: Text, width: int) -> Sequence[Text]:
    if one.column.whole:
        return list(cell.split("\n"))
    return list(cell.wrap(console, max(width, 1), overflow="fold"))


def _joined(
    shown: Sequence[_Shown], widths: Sequence[int], cells: Sequence[Sequence[Text]], part: int
) -> Text:
    """One line of a row; without blanks at its end."""
    line = Text(no_wrap=True)
    for one, width, lines in zip(shown, widths, cells, strict=True):
        text = lines[part].copy() if part < len(lines) else Text()
        blanks = " " * max(width - text.cell_len, 0)
        line.append_text(Text(blanks) + text if one.column.right else text + Text(blanks))
        line.append(GAP)
    line.rstrip()
    return line
