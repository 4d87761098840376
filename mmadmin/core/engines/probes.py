"""The probe rows: what an engine must show before a generation goes live.

The first four always must pass; the others are reported, and required where the spec says so
(`activation.required_probes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmadmin.core.build.recipe import Json

REPORT_FORMAT = 2
TEMPLATE_PREFIX = "template."
ALWAYS_REQUIRED: tuple[str, ...] = ("identity", "secret", "context", "completion")

MEASURING: tuple[str, ...] = ("stream", "speed")
"""Rows that measure: only an engine without other requests answers them truly."""
GENERATING: tuple[str, ...] = ("reasoning", "tool-call")
"""Rows that may generate hundreds of tokens."""

PROBE_ROWS: Mapping[str, str] = {
    "identity": "the process owns its port, and alias and model file belong to this generation",
    "secret": "a wrong secret is rejected",
    "context": "the context per slot is as planned",
    "completion": "a short completion returns text",
    "stream": "a streamed completion arrives in chunks and ends with usage",
    "template.plain": "one user message, no reasoning effort",
    "template.system-first": "a system message first",
    "template.system-later": "a system message that is not the first message",
    "template.two-users": "two user messages in a row",
    "template.turns": "a second turn",
    "template.tools": "tools whose parameters have array types",
    "template.tool-call": "a tool call with null content, and its result",
    "template.thinking-and-call": "an assistant message with thinking, text and a tool call",
    "template.image": "an image with text (engines with a projector)",
    "template.effort-none": 'reasoning effort "none"',
    "template.effort-low": 'reasoning effort "low"',
    "template.effort-medium": 'reasoning effort "medium"',
    "template.effort-high": 'reasoning effort "high"',
    "template.effort-bogus": "a reasoning effort that does not exist",
    "template.thinking-off": "thinking disabled by the template's variable",
    "reasoning": "reasoning is returned in a separate field",
    "tool-call": "a tool call is returned parsed",
    "speed": "generation speed is at least the configured minimum",
}


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """What one probe found."""

    name: str
    state: Literal["passed", "failed", "skipped"]
    message: str
    """What was observed, or why the probe was skipped."""
    required: bool
    ms: int = 0


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What an engine showed before it went live; kept with the generation."""

    rows: tuple[ProbeRow, ...]
    measured: Mapping[str, int]
    """`load_ms`, `ttft_ms`, `prompt_tokens_per_s_milli`, `generation_tokens_per_s_milli`."""
    process: Mapping[str, Json]
    """What was proved of the process: pid, alias, model path, context, slots."""

    @property
    def refused(self) -> tuple[ProbeRow, ...]:
        """Required rows that did not pass."""
        return tuple(row for row in self.rows if row.required and row.state != "passed")

    def as_json(self) -> dict[str, Json]:
        """The report as data for the record and the page."""
        rows: list[Any] = [asdict(row) for row in self.rows]
        return {
            "format": REPORT_FORMAT,
            "ok": not self.refused,
            "rows": rows,
            "measured": dict(self.measured),
            "process": dict(self.process),
        }


def report_rows(report: Mapping[str, Any] | None) -> list[ProbeRow]:
    """The rows of a stored report; format 1 calls a message `words`."""
    return [
        ProbeRow(
            name=str(row["name"]),
            state=row["state"],
            message=str(row.get("message", row.get("words", ""))),
            required=bool(row.get("required")),
            ms=int(row.get("ms") or 0),
        )
        for row in (report or {}).get("rows", [])
    ]
