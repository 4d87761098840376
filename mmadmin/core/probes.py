"""The probe rows: what an engine must show before a generation goes live.

The first four always must pass; the others are reported, and required where the spec says so
(`activation.required_probes`).
"""

from __future__ import annotations

from collections.abc import Mapping

ALWAYS_REQUIRED: tuple[str, ...] = ("identity", "secret", "context", "completion")

PROBE_ROWS: Mapping[str, str] = {
    "identity": "the process owns its port, and alias and model file are this generation's",
    "secret": "a wrong secret is refused with 401",
    "context": "the context of a slot is as planned",
    "completion": "a tiny completion comes back with text",
    "stream": "a streamed completion arrives in pieces and ends with usage",
    "template.plain": "one user turn",
    "template.system-late": "a system message that is not the first message",
    "template.two-users": "two user messages in a row",
    "template.tools": "tools whose parameters have array types",
    "template.null-content": "an assistant message with tool calls and null content",
    "template.tool-result": "the result of a tool call",
    "template.thinking": "an assistant message with thinking, text and tool calls",
    "template.effort-absent": "no reasoning effort given",
    "template.effort-low": 'reasoning effort "low"',
    "template.effort-nonsense": "a reasoning effort that does not exist",
    "reasoning": "reasoning text comes in its own field",
    "tool-call": "a tool call comes back parsed",
    "speed": "generation is as fast as the spec's floor asks",
}
