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
        "The deployment's name: lower-case letters, digits, dots and hyphens. People, keys and the "
        "history refer to it by this name.",
        required=True,
        pattern=NAME,
        remedy="use at most 63 of a-z, 0-9, '.' and '-'; start and end with a letter or digit",
        example="mistral-medium-3.5",
    ),
    Field(
        "public_name",
        "string",
        "The model name that clients send. It takes effect when the generation goes live. If "
        "empty: the deployment's name.",
        pattern=PUBLIC_NAME,
        remedy="use at most 128 letters, digits, '.', '_', ':', '/' and '-'",
        example="mistral-medium-3.5",
    ),
    Field("description", "text", "What this deployment is for, and for whom.", default=""),
    Field(
        "host",
        "string",
        "The host that serves it. If empty: its current host, or the panel's host.",
        default="",
        pattern=rf"(?:{NAME})?",
        remedy="use the name of a registered host",
    ),
    Field(
        "devices",
        "integers",
        "Indexes of the host's GPUs to use, in this order. If empty: the smallest number of GPUs "
        "that holds the model, those with most free memory first.",
        minimum=0,
        maximum=63,
        example=[2, 3],
    ),
)

TEMPLATE_FIELDS: tuple[Field, ...] = (
    Field(
        "source",
        "choice",
        'The chat template: "model" (the model\'s own), "file" (a file on the host, stored '
        'by its digest) or "inline" (the text below).',
        default="model",
        choices=("model", "file", "inline"),
        example="model",
    ),
    Field(
        "file",
        "string",
        "Absolute path of the template file on the host.",
        required=True,
        only_for=("file",),
        pattern=r"/[^\x00]+",
        remedy="write an absolute path",
        example="/srv/templates/chat.jinja",
    ),
    Field(
        "text",
        "text",
        "The template text.",
        required=True,
        only_for=("inline",),
        example="{{ messages[0].content }}",
    ),
    Field(
        "expect_sha256",
        "string",
        "SHA-256 of the model's template that the patches were written for (`mm template test` "
        "shows it). If a newer model has a different template, planning fails.",
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
        "Number of past generations to keep in the store for rollback.",
        default=5,
        minimum=1,
        maximum=1000,
    ),
    Field(
        "days",
        "integer",
        "Also keep generations that were live within this time.",
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
        '"overlap": the new engine starts alongside the old one; "swap": the old one stops first '
        'while requests wait; "auto": overlap if memory allows it.',
        default="auto",
        choices=("auto", "overlap", "swap"),
    ),
    Field(
        "auto_rollback",
        "boolean",
        "Roll back to the previous generation if the new one fails soon after going live.",
        default=True,
    ),
    Field(
        "watch_window_s",
        "integer",
        "How long after going live a failure triggers a rollback.",
        default=600,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "stall_s",
        "integer",
        "How long an engine may make no progress on its running requests before it counts as "
        "dead. Set it above the time that one batch of prompt tokens takes. 0: no limit.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "drain_timeout_s",
        "integer",
        "How long running requests of the old generation may take before they are ended.",
        default=300,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "hold_s",
        "integer",
        "How long new requests may wait during a swap, in addition to the load time.",
        default=180,
        minimum=0,
        maximum=3600,
        unit="seconds",
    ),
    Field(
        "load_deadline_s",
        "integer",
        "How long loading may take. 0: estimated from the model's size.",
        default=0,
        minimum=0,
        maximum=86400,
        unit="seconds",
    ),
    Field(
        "required_probes",
        "strings",
        "Probes that must pass before a generation goes live, in addition to identity, secret, "
        "context and completion, which are always required.",
        default=[],
        choices=tuple(PROBE_ROWS),
        example=["template.tools", "tool-call"],
    ),
    Field(
        "speed_floor_percent",
        "integer",
        "Reject a generation that is slower than this share of its parent's measured speed. "
        "0: not checked.",
        default=0,
        minimum=0,
        maximum=100,
        unit="percent",
    ),
    Field(
        "overrule",
        "mapping",
        "Rule warnings to override: the rule's name and the reason, which is kept with the "
        "generation. Refusals cannot be overridden.",
        default={},
        example={"context-beyond-training": "tried with rope scaling, see the evaluation"},
    ),
)


PATCH_FIELDS: Mapping[str, tuple[Field, ...]] = {
    "reasoning-effort-lenient": (),
    "set-default": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("value", "scalar", "Its value if the client omits it.", required=True),
    ),
    "coerce-unknown": (
        Field("variable", "string", "The variable.", required=True, pattern=r"[A-Za-z_]\w*"),
        Field("allowed", "scalars", "Values that are left unchanged.", required=True),
        Field("value", "scalar", "The value that replaces all others.", required=True),
    ),
    "replace": (
        Field("old", "text", "Text that occurs in the template exactly once.", required=True),
        Field("new", "text", "The replacement.", required=True),
    ),
    "unified-diff": (Field("diff", "text", "A unified diff of the template.", required=True),),
}
PATCH_KIND = Field("kind", "choice", "What the patch does.", required=True, choices=PATCH_KINDS)
ENGINE_KIND = Field(
    "kind",
    "string",
    "The engine. It determines the fields of [engine], [model] and [serve].",
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
    "": "Name, host and GPUs.",
    "model": "Which model to serve, and where it comes from.",
    "engine": "Which engine to use, and how to build it.",
    "template": "The chat template and its patches.",
    "serve": "Context, slots, devices and sampling.",
    "keep": "Which past generations to keep in the store.",
    "activation": "How a generation goes live and rolls back.",
}
