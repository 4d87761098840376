"""The tables of a deployment file, field by field: parser, docs and forms read them.

`[engine]`, `[model]` and `[serve]` are the engine's own (`Engine.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mmadmin.core.catalog import DEFAULT_ENGINE
from mmadmin.core.engines.probes import PROBE_ROWS
from mmadmin.core.engines.protocol import Engine
from mmadmin.core.spec.fields import Field
from mmadmin.core.spec.origin import SHA256

NAME = r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?"
PUBLIC_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?"
PATCH_KINDS = (
    "reasoning-effort-lenient",
    "set-default",
    "coerce-unknown",
    "replace",
    "unified-diff",
)


TOP_FIELDS: tuple[Field, ...] = (
    Field(
        "name",
        "string",
        "The deployment's name: lower case letters, digits, dots and hyphens. It is how people, "
        "keys and the history refer to it.",
        required=True,
        pattern=NAME,
        remedy="use up to 63 of a-z, 0-9, '.' and '-', beginning and ending with a letter or digit",
        example="mistral-medium-3.5",
    ),
    Field(
        "public_name",
        "string",
        "The model name that clients send, from when the generation goes live until another one"
        " does. The deployment's name when it is left out.",
        pattern=PUBLIC_NAME,
        remedy="use up to 128 of letters, digits, '.', '_', ':', '/' and '-'",
        example="mistral-medium-3.5",
    ),
    Field("description", "text", "For people: what this is and whom it is for.", default=""),
    Field(
        "host",
        "string",
        "The host that serves it. Left out: the panel's own host, or the one where it is now.",
        default="",
        pattern=rf"(?:{NAME})?",
        remedy="use the name of a registered host",
    ),
    Field(
        "devices",
        "integers",
        "GPUs of the host that it gets, by index, in this order. Left out: the fewest that hold "
        "it, the emptiest first.",
        minimum=0,
        maximum=63,
        example=[2, 3],
    ),
)

TEMPLATE_FIELDS: tuple[Field, ...] = (
    Field(
        "source",
        "choice",
        'The chat template: "model" (the model\'s own), "file" (a file of the host, kept by '
        'its digest) or "inline" (the text below).',
        default="model",
        choices=("model", "file", "inline"),
        example="model",
    ),
    Field(
        "file",
        "string",
        "The template file on the host, absolute.",
        required=True,
        only_for=("file",),
        pattern=r"/[^\x00]+",
        remedy="write an absolute path",
        example="/srv/templates/chat.jinja",
    ),
    Field(
        "text",
        "text",
        "The template itself.",
        required=True,
        only_for=("inline",),
        example="{{ messages[0].content }}",
    ),
    Field(
        "expect_sha256",
        "string",
        "Digest of the model's own template that the patches were written for (`mm template test` "
        "shows it). When a newer model brings another template, the plan stops and says so.",
        default="",
        only_for=("model",),
        pattern=rf"(?:{SHA256})?",
        remedy="write 64 hex digits",
    ),
    Field(
        "patches",
        "tables",
        "Changes to the template, in order; each has a `kind`: " + ", ".join(PATCH_KINDS) + ".",
        default=[],
    ),
)

KEEP_FIELDS: tuple[Field, ...] = (
    Field(
        "generations",
        "integer",
        "How many past generations stay in the store, ready to go back to.",
        default=5,
        minimum=1,
        maximum=1000,
    ),
    Field(
        "days",
        "integer",
        "Generations that were live within this time stay too.",
        default=30,
        minimum=0,
        maximum=3650,
        unit="days",
    ),
)

ACTIVATION_FIELDS: tuple[Field, ...] = (
    Field(
        "mode",
        "choice",
        '"overlap": the new engine starts beside the old one; "swap": the old one stops first '
        'while requests wait; "auto": overlap where memory allows it.',
        default="auto",
        choices=("auto", "overlap", "swap"),
    ),
    Field(
        "auto_rollback",
        "boolean",
        "Go back to the previous generation when the new one fails soon after it went live.",
        default=True,
    ),
    Field(
        "watch_window_s",
        "integer",
        "How long after going live a failure leads to a roll-back.",
        default=600,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "stall_s",
        "integer",
        "How long an engine with requests in work may make no progress with any of them before it "
        "counts as dead, though its clients stay. Above what a batch of prompt tokens takes here. "
        "0: for ever.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "drain_timeout_s",
        "integer",
        "How long running requests of the old generation may go on before they are cut.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "hold_s",
        "integer",
        "How long new requests may wait during a swap, besides the time that loading takes.",
        default=180,
        minimum=0,
        maximum=3600,
        unit="seconds",
    ),
    Field(
        "load_deadline_s",
        "integer",
        "How long loading may take. 0: from the model's size.",
        default=0,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "required_probes",
        "strings",
        "Probe rows that must pass before a generation goes live, besides identity, secret, "
        "context and completion, which always must.",
        default=[],
        choices=tuple(PROBE_ROWS),
        example=["template.tools", "tool-call"],
    ),
    Field(
        "speed_floor_percent",
        "integer",
        "Refuse a generation that generates slower than this share of its parent's measured "
        "speed. 0: not checked.",
        default=0,
        minimum=0,
        maximum=100,
        unit="percent",
    ),
    Field(
        "overrule",
        "mapping",
        "Warnings of the rules that do not hold here: the rule's name and the reason, which is "
        "kept with the generation. Refusals cannot be overruled.",
        default={},
        example={"context-beyond-training": "tried with rope scaling, see the evaluation"},
    ),
)


PATCH_FIELDS: Mapping[str, tuple[Field, ...]] = {
    "reasoning-effort-lenient": (),
    "set-default": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("value", "scalar", "Its value when the client omits it.", required=True),
    ),
    "coerce-unknown": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("allowed", "scalars", "The values that stay as they are.", required=True),
        Field("value", "scalar", "What every other value becomes.", required=True),
    ),
    "replace": (
        Field("old", "text", "Text that must stand in the template exactly once.", required=True),
        Field("new", "text", "What stands there instead.", required=True),
    ),
    "unified-diff": (Field("diff", "text", "A unified diff of the template.", required=True),),
}
PATCH_KIND = Field("kind", "choice", "What the patch does.", required=True, choices=PATCH_KINDS)
ENGINE_KIND = Field(
    "kind",
    "string",
    "The engine. What [engine], [model] and [serve] may hold follows from it.",
    default=DEFAULT_ENGINE,
    example=DEFAULT_ENGINE,
)


def sections_of(engine: Engine) -> Mapping[str, tuple[Field, ...]]:
    """Every table of a deployment file with that engine, in the order in which it is written."""
    return {
        "": TOP_FIELDS,
        "model": tuple(engine.tables.model),
        "engine": (ENGINE_KIND, *engine.tables.engine),
        "template": TEMPLATE_FIELDS,
        "serve": tuple(engine.tables.serve),
        "keep": KEEP_FIELDS,
        "activation": ACTIVATION_FIELDS,
    }


SECTION_HELP: Mapping[str, str] = {
    "": "What it is called.",
    "model": "Which model, from where, and what is done to it.",
    "engine": "Which engine, from which source, built how.",
    "template": "The chat template and its patches.",
    "serve": "How it is served: context, slots, devices, sampling.",
    "keep": "Which past generations stay in the store.",
    "activation": "How a generation goes live, and back.",
}
