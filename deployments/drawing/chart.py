"""Charts of values over time: stacked bars and lines.

The picture stretches with the page while its words stay text beside it, so that both are sharp
from 390 px to 2560 px.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

WIDTH, HEIGHT = 1000, 200
FILL = 0.82
"""Part of a slot that its bar fills."""
TICKS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """One named row of values, in the order of the times."""

    name: str
    values: Sequence[float]
    css: str
    """Class of its colour."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The strip of one time, over its whole height, with its values as text."""

    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    name: str
    title: str
    series: Sequence[Series]
    bars: Sequence[tuple[str, str]]
    """(path of all of a series' bars, class)"""
    lines: Sequence[tuple[str, str]]
    """(path, class)"""
    bar_width: float
    slots: Sequence[Slot]
    """Shown where the pointer is on a bar."""
    y_labels: Sequence[str]
    """Top to bottom."""
    x_labels: Sequence[str]
    """Left to right."""
    label: str
    empty: bool
    width: int = WIDTH
    height: int = HEIGHT


def nice(top: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not under `top`."""
    if top <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(top))
    return next(size * step for step in (1, 2, 2.5, 5, 10) if size * step >= top - 1e-9)


def draw(
    name: str,
    title: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    *,
    format_value: Callable[[float], str],
    lines: bool = False,
) -> Chart:
    """Stacked bars, or lines over each other."""
    count = len(times)
    totals = [sum(s.values[i] for s in series) for i in range(count)]
    peak = (
        max((max(s.values, default=0) for s in series), default=0)
        if lines
        else max(totals, default=0)
    )
    top = nice(peak)
    bars = [] if lines else _bars(count, series, top)
    paths = [(_line(s.values, top), s.css) for s in series] if lines else []
    return Chart(
        name=name,
        title=title,
        series=series,
        bars=bars,
        lines=paths,
        bar_width=round(FILL * WIDTH / max(1, count), 2),
        slots=[] if lines else _slots(times, series, format_value),
        y_labels=(format_value(top), format_value(top / 2), format_value(0)),
        x_labels=_x_labels(times),
        label=_label(title, times, series, format_value, lines=lines),
        empty=peak <= 0,
    )


def _bars(count: int, series: Sequence[Series], top: float) -> list[tuple[str, str]]:
    """Each series as one path of upright strokes: one rectangle each would outweigh the page."""
    slot = WIDTH / max(1, count)
    below = [0.0] * count
    paths = []
    for s in series:
        pieces = []
        for i, value in enumerate(s.values):
            if value <= 0:
                continue
            tall = HEIGHT * value / top
            pieces.append(f"M{(i + 0.5) * slot:.1f} {HEIGHT - below[i]:.1f}v{-tall:.1f}")
            below[i] += tall
        paths.append(("".join(pieces), s.css))
    return paths


def _slots(
    times: Sequence[datetime], series: Sequence[Series], format_value: Callable[[float], str]
) -> list[Slot]:
    slot = WIDTH / max(1, len(times))
    found = []
    for i, moment in enumerate(times):
        values = ", ".join(
            f"{format_value(s.values[i])} {s.name}" for s in series if s.values[i] > 0
        )
        if values:
            found.append(Slot(round(i * slot, 1), round(slot, 1), f"{moment:%d %b %H:%M} {values}"))
    return found


def _line(values: Sequence[float], top: float) -> str:
    """A path with a gap wherever there is no value."""
    slot = WIDTH / max(1, len(values))
    pieces, drawn = [], False
    for i, value in enumerate(values):
        if value <= 0:
            drawn = False
            continue
        x, y = round((i + 0.5) * slot, 1), round(HEIGHT - HEIGHT * value / top, 1)
        alone = not drawn and (i + 1 == len(values) or values[i + 1] <= 0)
        pieces.append(f"{'L' if drawn else 'M'}{x} {y}" + ("h0.1" if alone else ""))
        drawn = True
    return "".join(pieces)


def _x_labels(times: Sequence[datetime]) -> list[str]:
    if not times:
        return []
    days = (times[-1] - times[0]).days >= 2  # noqa: PLR2004
    step = max(1, len(times) // TICKS)
    return [f"{t:%d %b}" if days else f"{t:%H:%M}" for t in times[::step]]


def _label(
    title: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    format_value: Callable[[float], str],
    *,
    lines: bool,
) -> str:
    if not times:
        return f"{title}: no data."
    parts = []
    for s in series:
        best = max(range(len(times)), key=lambda i: s.values[i])
        filled = [v for v in s.values if v > 0]
        mean = sum(filled) / len(filled) if filled else 0
        middle = (
            f"mean {format_value(mean)}" if lines else f"{format_value(sum(s.values))} in total"
        )
        parts.append(
            f"{s.name}: {middle}; maximum {format_value(s.values[best])}"
            f" on {times[best]:%d %b %H:%M}"
        )
    return (
        f"{title} from {times[0]:%d %b %H:%M} to {times[-1]:%d %b %H:%M} UTC. {'; '.join(parts)}."
    )
