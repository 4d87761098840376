"""A build's graph: inputs left, goal right, every step a box with its state.

Layers by longest path from the sources; in a layer, boxes lie near the middle of what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BOX_W, BOX_H = 178, 48
GAP_X, GAP_Y = 34, 14
PAD = 6


class Node(Protocol):
    """What a graph is drawn from: a build step or anything like it."""

    derivation: str
    inputs: list[str]
    name: str
    recipe: str
    state: str


@dataclass(frozen=True, slots=True)
class Box:
    """One step's place."""

    step: Node
    x: int
    y: int

    @property
    def middle(self) -> int:
        """Height of its middle."""
        return self.y + BOX_H // 2


@dataclass(frozen=True, slots=True)
class Edge:
    """A curve from an input to the step that needs it."""

    path: str
    hot: bool
    """True when the step that needs it is running."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A laid-out graph."""

    width: int
    height: int
    boxes: list[Box]
    edges: list[Edge]
    label: str


def draw(steps: Sequence[Node]) -> Drawing | None:
    """Lay the graph out; None when there is nothing to connect."""
    if len(steps) < 2:  # noqa: PLR2004
        return None
    known = {step.derivation: step for step in steps}
    needs = {d: [i for i in step.inputs if i in known] for d, step in known.items()}
    places = _places(needs)
    boxes = {d: Box(known[d], x, y) for d, (x, y) in places.items()}
    edges = [
        Edge(_curve(boxes[source], boxes[d]), known[d].state == "running")
        for d, sources in needs.items()
        for source in sources
    ]
    width = max(x for x, _ in places.values()) + BOX_W + PAD
    height = max(y for _, y in places.values()) + BOX_H + PAD
    states = [step.state for step in steps]
    counted = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    label = f"Graph of {len(steps)} steps: {counted}. The list below has the same information."
    return Drawing(width, height, list(boxes.values()), edges, label)


def _places(needs: dict[str, list[str]]) -> dict[str, tuple[int, int]]:
    """Left upper corner of every box."""
    depth: dict[str, int] = {}

    def depth_of(digest: str) -> int:
        if digest not in depth:
            depth[digest] = 1 + max((depth_of(i) for i in needs[digest]), default=-1)
        return depth[digest]

    layers: dict[int, list[str]] = {}
    for digest in needs:
        layers.setdefault(depth_of(digest), []).append(digest)
    tallest = max(len(layer) for layer in layers.values())
    height = tallest * (BOX_H + GAP_Y) - GAP_Y
    middle: dict[str, float] = {}
    places: dict[str, tuple[int, int]] = {}
    for level in sorted(layers):
        layer = layers[level]
        layer.sort(key=lambda d: _mean([middle[i] for i in needs[d]], height / 2))
        top = (height - (len(layer) * (BOX_H + GAP_Y) - GAP_Y)) // 2
        for row, digest in enumerate(layer):
            y = PAD + top + row * (BOX_H + GAP_Y)
            places[digest] = (PAD + level * (BOX_W + GAP_X), y)
            middle[digest] = y + BOX_H / 2
    return places


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _curve(source: Box, target: Box) -> str:
    x1, x2 = source.x + BOX_W, target.x
    bend = (x1 + x2) // 2
    return (
        f"M{x1} {source.middle}C{bend} {source.middle} {bend} {target.middle} {x2} {target.middle}"
    )
