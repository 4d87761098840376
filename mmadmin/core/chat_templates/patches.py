"""Chat templates: patches as data, and conversations that show what a patch really changes.

A patch says what it changes; it is applied to the template's text, never by running it. The
templates themselves run only in a limited child (`mmadmin.core.chat_templates.render`), because a
template can hang or eat memory even in jinja2's sandbox.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from mmadmin.core.build.params import Table, fields, items, refuse, table, text
from mmadmin.core.build.recipe import ChildLimits, Json
from mmadmin.core.errors import InvalidDerivation, InvalidModel, StepFailed

LIMITS = ChildLimits(time_s=30, memory_bytes=1 << 30, output_bytes=32 << 20)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
TOOL = "multiply"
"""The tool of the conversations that have one."""
IGNORES_TOOLS = "the template ignores the tools: clients that send some get no tool call"
USER_TEXT = "What is 17 * 23?"


class PatchFails(InvalidModel):
    """A patch does not fit the template, or breaks it."""

    code = "patch_fails"


# --- patches ---------------------------------------------------------------------------------


def _literal(value: Json, where: str) -> str:
    """A value as a jinja literal."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value.isprintable():
        refuse(where, value, "a text, a whole number, true, false or null")
    return json.dumps(value, ensure_ascii=False)


def _variable(patch: Table, where: str) -> str:
    name = text(patch, "variable", where)
    if not VARIABLE.fullmatch(name):
        refuse(f"{where}.variable", name, "a template variable's name")
    return name


def _set_default(patch: Table, where: str) -> str:
    """The line that gives a variable a value when the client sent none."""
    fields(patch, where, required=("kind", "variable", "value"))
    name, value = _variable(patch, where), _literal(patch["value"], f"{where}.value")
    return (
        f"{{%- if {name} is not defined or {name} is none -%}}"
        f"{{%- set {name} = {value} -%}}{{%- endif %}}"
    )


def _coerce_unknown(patch: Table, where: str) -> str:
    """The line that replaces a value that the template would refuse."""
    fields(patch, where, required=("kind", "variable", "allowed", "value"))
    name, value = _variable(patch, where), _literal(patch["value"], f"{where}.value")
    allowed = [
        _literal(v, f"{where}.allowed[{i}]") for i, v in enumerate(items(patch, "allowed", where))
    ]
    if not allowed:
        refuse(f"{where}.allowed", [], "at least one value")
    return (
        f"{{%- if {name} is defined and {name} not in [{', '.join(allowed)}] -%}}"
        f"{{%- set {name} = {value} -%}}{{%- endif %}}"
    )


def _lenient_effort(patch: Table, where: str) -> str:
    """The named set: omitted → high, anything but none and high → high, none stays none.

    An engine may take a top-level `"reasoning_effort": "none"` out of the template's variables and
    say `enable_thinking = false` instead, so an omitted effort means high only where thinking is
    not switched off.
    """
    fields(patch, where, required=("kind",))
    name = "reasoning_effort"
    allowed: list[Json] = ["none", "high"]
    coerce: Table = {"kind": "", "variable": name, "allowed": allowed, "value": "high"}
    return (
        f"{{%- if {name} is not defined or {name} is none -%}}"
        "{%- if enable_thinking is defined and enable_thinking == false -%}"
        f'{{%- set {name} = "none" -%}}{{%- else -%}}{{%- set {name} = "high" -%}}{{%- endif -%}}'
        "{%- endif -%}" + _coerce_unknown(coerce, where)
    )


def _prelude(write: Callable[[Table, str], str]) -> Callable[[str, Table, str], str]:
    """A patch that is put before the template.

    It adds no text to any prompt: its tags stand on one line with no blank between them, and
    directly before the template's first character.
    """

    def apply(template: str, patch: Table, where: str) -> str:
        return write(patch, where) + template

    return apply


def _replace(template: str, patch: Table, where: str) -> str:
    fields(patch, where, required=("kind", "old", "new"))
    old, new = text(patch, "old", where), text(patch, "new", where, "")
    count = template.count(old)
    if count != 1:
        raise PatchFails(
            f"{where}.old is in the template {count} times",
            remedy="give a text that is there exactly once",
            count=count,
        )
    return template.replace(old, new)


def _unified_diff(template: str, patch: Table, where: str) -> str:
    fields(patch, where, required=("kind", "diff"))
    return apply_diff(template, text(patch, "diff", where), where)


def _in_any_line_ends(
    apply: Callable[[str, Table, str], str],
) -> Callable[[str, Table, str], str]:
    """A patch that also fits a template with the line ends of Windows, which it keeps.

    A deployment file holds its texts with plain line ends, whatever the template has.
    """

    def fit(template: str, patch: Table, where: str) -> str:
        try:
            return apply(template, patch, where)
        except PatchFails:
            if "\r\n" not in template or "\n" in template.replace("\r\n", ""):
                raise
            plain = {
                key: value.replace("\r\n", "\n") if isinstance(value, str) else value
                for key, value in patch.items()
            }
            patched = apply(template.replace("\r\n", "\n"), plain, where)
            return patched.replace("\n", "\r\n")

    return fit


PATCHES: Mapping[str, Callable[[str, Table, str], str]] = {
    "set-default": _prelude(_set_default),
    "coerce-unknown": _prelude(_coerce_unknown),
    "reasoning-effort-lenient": _prelude(_lenient_effort),
    "replace": _in_any_line_ends(_replace),
    "unified-diff": _in_any_line_ends(_unified_diff),
}
PRELUDES: Mapping[str, Callable[[Table, str], str]] = {
    "set-default": _set_default,
    "coerce-unknown": _coerce_unknown,
    "reasoning-effort-lenient": _lenient_effort,
}


def describe(patch: Table) -> str:
    """In words what a patch changes."""
    kind = patch.get("kind")
    if kind == "set-default":
        return f"{patch['variable']} is {patch['value']!r} when the client sends none"
    if kind == "coerce-unknown":
        return f"{patch['variable']} becomes {patch['value']!r} unless it is in {patch['allowed']}"
    if kind == "reasoning-effort-lenient":
        return (
            "reasoning_effort: omitted → high (none where thinking is switched off), "
            "anything but none and high → high"
        )
    if kind == "replace":
        return "one passage is replaced"
    return "a unified diff is applied"


def check_patches(patches: Json, where: str = "patches") -> None:
    """Refuse patches that cannot be right for any template (`InvalidDerivation`)."""
    if not isinstance(patches, list) or not patches:
        refuse(where, patches, "a list of patches")
    for i, value in enumerate(patches):
        at = f"{where}[{i}]"
        patch = table(value, at)
        kind = patch.get("kind")
        if kind not in PATCHES:
            refuse(f"{at}.kind", kind, f"one of {', '.join(PATCHES)}")
        if kind in PRELUDES:
            PRELUDES[str(kind)](patch, at)
        elif kind == "replace":
            fields(patch, at, required=("kind", "old", "new"))
            text(patch, "old", at)
            text(patch, "new", at, "")
        else:
            fields(patch, at, required=("kind", "diff"))
            _hunks(text(patch, "diff", at), at)


def apply_patches(template: str, patches: Sequence[Json], where: str = "patches") -> str:
    """Patch a template; preludes end up in their order.

    Raises `PatchFails` and `InvalidDerivation`.
    """
    check_patches(list(patches), where)
    preludes = [(i, p) for i, p in enumerate(patches) if table(p, where).get("kind") in PRELUDES]
    others = [(i, p) for i, p in enumerate(patches) if table(p, where).get("kind") not in PRELUDES]
    for i, value in [*others, *reversed(preludes)]:
        patch = table(value, where)
        template = PATCHES[str(patch["kind"])](template, patch, f"{where}[{i}]")
    return template


# --- unified diffs ---------------------------------------------------------------------------

Hunk = tuple[int, list[str]]
"""First line of the old text (1-based), and the hunk's lines with their marks."""


def _bad_diff(where: str, what: str) -> NoReturn:
    raise InvalidDerivation(
        f"{where}.diff is not a unified diff: {what}", remedy="make it with diff -u or git diff"
    )


def _hunks(diff: str, where: str) -> list[Hunk]:
    hunks: list[Hunk] = []
    left_old = left_new = 0
    for line in diff.removesuffix("\n").split("\n"):  # a template may hold other breaks
        if left_old > 0 or left_new > 0:
            mark = line[:1] or " "
            if mark not in " +-":
                _bad_diff(where, f"the line {line!r}")
            left_old -= mark in " -"
            left_new -= mark in " +"
            hunks[-1][1].append(mark + line[1:])
        elif found := HUNK.fullmatch(line):
            left_old, left_new = int(found[2] or 1), int(found[4] or 1)
            hunks.append((int(found[1]), []))
        elif line and not line.startswith(("---", "+++", "diff ", "index ", "\\")):
            _bad_diff(where, f"the line {line!r}")
    if not hunks or left_old or left_new:
        _bad_diff(where, "it is cut short" if hunks else "it has no hunk")
    return hunks


def apply_diff(template: str, diff: str, where: str) -> str:
    """Apply a unified diff, exactly: no fuzz, no offset. Raises `PatchFails`."""
    lines = template.split("\n")
    shift = 0
    for start, marked in _hunks(diff, where):
        old = [line[1:] for line in marked if line[0] in " -"]
        new = [line[1:] for line in marked if line[0] in " +"]
        at = (start - 1 if old else start) + shift
        if lines[at : at + len(old)] != old:
            raise PatchFails(
                f"{where}.diff does not fit the template at line {start}",
                remedy="make the diff against this template",
                line=start,
            )
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "\n".join(lines)


# --- conversations ---------------------------------------------------------------------------


def _call(identifier: str = "call00001") -> dict[str, Json]:
    arguments: dict[str, Json] = {"a": 17, "b": 23}
    return {
        "id": identifier,
        "type": "function",
        "function": {"name": TOOL, "arguments": arguments},
    }


def _tools() -> list[Json]:
    number: dict[str, Json] = {"type": ["integer", "null"], "description": "a number"}
    parameters: dict[str, Json] = {
        "type": "object",
        "properties": {"a": number, "b": number},
        "required": ["a", "b"],
    }
    function: dict[str, Json] = {
        "name": TOOL,
        "description": "Multiply two numbers",
        "parameters": parameters,
    }
    return [{"type": "function", "function": function}]


def _says(role: str, content: Json) -> dict[str, Json]:
    return {"role": role, "content": content}


def conversations() -> dict[str, dict[str, Json]]:
    """What real clients send, by name: the variables that a template is rendered with."""
    user = _says("user", USER_TEXT)
    called: dict[str, Json] = {"role": "assistant", "content": None, "tool_calls": [_call()]}
    result: dict[str, Json] = {
        "role": "tool",
        "tool_call_id": "call00001",
        "name": TOOL,
        "content": "391",
    }
    thought: dict[str, Json] = {
        "role": "assistant",
        "content": "I use the tool.",
        "reasoning_content": "This is a multiplication.",
        "tool_calls": [_call()],
    }
    image: list[Json] = [
        {"type": "text", "text": USER_TEXT},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    plain: list[Json] = [user]
    rows: dict[str, dict[str, Json]] = {
        "plain": {"messages": plain},
        "system-first": {"messages": [_says("system", "Be brief."), user]},
        "system-later": {
            "messages": [user, _says("assistant", "391"), _says("system", "Be brief."), user]
        },
        "two-users": {"messages": [_says("user", "Hello."), user]},
        "turns": {"messages": [user, _says("assistant", "391"), _says("user", "Thank you.")]},
        "tools": {"messages": plain, "tools": _tools()},
        "tool-call": {"messages": [user, called, result], "tools": _tools()},
        "thinking-and-call": {"messages": [user, thought, result], "tools": _tools()},
        "image": {"messages": [_says("user", image)]},
    }
    for effort in ("none", "low", "medium", "high", "bogus"):
        rows[f"effort-{effort}"] = {"messages": plain, "reasoning_effort": effort}
    rows["thinking-off"] = {"messages": plain, "enable_thinking": False}
    return rows


REQUIRED = ("plain",)
"""Rows that every usable template renders."""


def problem_of(row: str, output: str) -> str:
    """What is wrong with a rendering although it did not fail, or ""."""
    if USER_TEXT not in output:
        return "the user's text is missing"
    if "{{" in output or "{%" in output or "{-" in output:
        return "template braces are left in it: a tag is misspelt"
    if "\\n" in output and row == "plain":
        return "it holds a literal backslash-n"
    return ""


def ignores_tools(row: str, output: str) -> bool:
    """True for a rendering of a conversation with tools that does not name them."""
    return "tools" in conversations()[row] and TOOL not in output


Renders = Mapping[str, Mapping[str, Json]]
"""Row → {"output"} or {"error"}."""
RENDERER = "mmadmin.core.chat_templates.render"


class Child(Protocol):
    """Whoever runs one of our modules as a limited child: a recipe's toolbox, or less."""

    def python(self, module: str, request: Json, *, limits: ChildLimits) -> Json:
        """The child's answer. Raises `StepFailed` when it goes beyond its limits."""
        ...


def render_matrix(
    templates: Mapping[str, str], child: Child, variables: Mapping[str, Json] | None = None
) -> dict[str, Renders]:
    """Every conversation with each of the named templates, in a limited child.

    `variables` are given to each beside its own, such as a model's `bos_token` and `eos_token`.
    Raises `PatchFails` for a template that goes beyond the limits of time, memory or output.
    """
    rows: dict[str, Json] = {
        name: {**(variables or {}), **row} for name, row in conversations().items()
    }
    request: Json = {"templates": {**templates}, "rows": rows}
    try:
        answer = child.python(RENDERER, request, limits=LIMITS)
    except StepFailed as error:
        raise PatchFails(
            f"the template cannot be rendered safely: {error.message}",
            remedy="do not use this template: rendering a conversation takes milliseconds",
        ) from error
    renders = table(table(answer, "answer")["renders"], "renders")
    return {
        name: {row: table(value, row) for row, value in table(renders[name], name).items()}
        for name in templates
    }


def compare(before: Renders, after: Renders, *, required: Sequence[str] = REQUIRED) -> list[Json]:
    """The report of a patch: each row before and after, with the difference in lines.

    Raises `PatchFails` when a required row is not rendered properly, or when a row that was
    rendered before is not any more.
    """
    rows: list[Json] = []
    for row in before:
        old, new = _outcome(row, before[row]), _outcome(row, after[row])
        if not new["ok"] and not old["ok"] and row in required:
            raise PatchFails(
                f"the template itself fails for the conversation {row}: {old['text']}",
                remedy="take another template, or add a patch that corrects it",
                row=row,
            )
        if not new["ok"] and old["ok"]:
            raise PatchFails(
                f"the patched template fails for the conversation {row}: {new['text']}",
                remedy="correct the patch",
                row=row,
            )
        lines = list(
            difflib.unified_diff(
                str(old["text"]).splitlines(),
                str(new["text"]).splitlines(),
                "before",
                "after",
                lineterm="",
            )
        )
        rows.append(
            {
                "conversation": row,
                "before": old,
                "after": new,
                "changed": old != new,
                "diff": "\n".join(lines),
            }
        )
    return rows


def _outcome(row: str, render: Mapping[str, Json]) -> dict[str, Json]:
    if "error" in render:
        return {"ok": False, "text": render["error"]}
    output = str(render["output"])
    problem = problem_of(row, output)
    return {"ok": not problem, "text": f"{problem}: {output}" if problem else output}
