"""Template patches as data, and what rendering says about them."""

from __future__ import annotations

import json

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.chat_templates.patches import (
    USER_TEXT,
    PatchFails,
    apply_patches,
    check_patches,
    compare,
    conversations,
    describe,
)
from mmadmin.core.chat_templates.render import render
from mmadmin.core.errors import InvalidDerivation

STRICT = (
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'none' %}{%- endif %}\n"
    "{%- if reasoning_effort not in ['none', 'high'] %}"
    '{{- raise_exception(\'reasoning_effort must be either "none" or "high"\') }}{%- endif %}\n'
    "{{- bos_token }}[{{ reasoning_effort }}]\n"
    "{%- for message in messages %}{{- message['content'] }}{%- endfor %}"
)
LENIENT: list[Json] = [{"kind": "reasoning-effort-lenient"}]
PLAIN = {row: conversations()[row] for row in ("plain", "effort-low", "effort-none", "effort-high")}


def outputs(template: str) -> dict[str, str]:
    """What each row renders to, or its error."""
    rows = render(template, PLAIN)
    return {row: str(value.get("output", value.get("error"))) for row, value in rows.items()}  # type: ignore[union-attr]


def test_the_lenient_set_changes_just_what_it_says() -> None:
    """Omitted → high, low → high, high and none as before; no blank is added anywhere."""
    before, after = outputs(STRICT), outputs(apply_patches(STRICT, LENIENT))
    assert "must be either" in before["effort-low"]
    assert before["plain"] == f"<s>[none]{USER_TEXT}"
    high = f"<s>[high]{USER_TEXT}"
    assert after == {
        "plain": high,
        "effort-low": high,
        "effort-high": high,
        "effort-none": f"<s>[none]{USER_TEXT}",
    }


def test_an_effort_that_the_server_swallowed_is_none() -> None:
    """llama-server turns a top-level "none" into enable_thinking = false and no effort at all."""
    template = apply_patches(STRICT, LENIENT)
    off, on = ({**PLAIN["plain"], "enable_thinking": value} for value in (False, True))
    assert render(template, {"off": off, "on": on}) == {
        "off": {"output": f"<s>[none]{USER_TEXT}"},
        "on": {"output": f"<s>[high]{USER_TEXT}"},
    }


def test_a_null_effort_counts_as_omitted() -> None:
    """A client that sends null gets the default."""
    rows = render(
        apply_patches(STRICT, LENIENT), {"x": {**PLAIN["plain"], "reasoning_effort": None}}
    )
    assert rows == {"x": {"output": f"<s>[high]{USER_TEXT}"}}


@pytest.mark.parametrize("value", ["high", 'with "quotes" and \\ backslash', "über", 3, True, None])
def test_values_of_any_kind_become_literals(value: Json) -> None:
    """A default is what it was written as, whatever is in it."""
    patches: list[Json] = [{"kind": "set-default", "variable": "v", "value": value}]
    template = apply_patches("{{ v == wanted }}", patches)
    assert render(template, {"x": {"wanted": value}}) == {"x": {"output": "True"}}


def test_preludes_keep_their_order_whatever_else_is_patched() -> None:
    """set-default comes before coerce-unknown, as written, also around a replace."""
    patches: list[Json] = [
        {"kind": "set-default", "variable": "v", "value": "weird"},
        {"kind": "replace", "old": "old", "new": "new"},
        {"kind": "coerce-unknown", "variable": "v", "allowed": ["a", "b"], "value": "a"},
    ]
    assert render(apply_patches("old {{ v }}", patches), {"x": {}}) == {"x": {"output": "new a"}}


def test_coerce_unknown_leaves_the_omitted_alone() -> None:
    """Without a default, an omitted variable stays undefined."""
    patches: list[Json] = [
        {"kind": "coerce-unknown", "variable": "v", "allowed": ["a"], "value": "a"}
    ]
    template = apply_patches("{{ v is defined }}", patches)
    assert render(template, {"x": {}, "y": {"v": "q"}}) == {
        "x": {"output": "False"},
        "y": {"output": "True"},
    }


@pytest.mark.parametrize("template", ["none of it", "twice twice"])
def test_replace_wants_its_text_exactly_once(template: str) -> None:
    """Zero or several places are an error that counts them."""
    with pytest.raises(PatchFails, match="times"):
        apply_patches(template, [{"kind": "replace", "old": "twice", "new": "x"}])


DIFF = "--- a\n+++ b\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n@@ -5 +5,2 @@\n-five\n+5\n+5b\n"


def test_a_unified_diff_applies_exactly_or_not_at_all() -> None:
    """Several hunks, no fuzz, and the line that does not fit is named."""
    patch: list[Json] = [{"kind": "unified-diff", "diff": DIFF}]
    assert (
        apply_patches("one\ntwo\nthree\nfour\nfive\nsix\n", patch)
        == "one\n2\nthree\nfour\n5\n5b\nsix\n"
    )
    with pytest.raises(PatchFails, match="line 1"):
        apply_patches("zero\none\ntwo\nthree\nfour\nfive\n", patch)


def test_patches_fit_a_template_with_line_ends_of_windows() -> None:
    """A deployment file's texts have plain line ends; the template keeps its own."""
    template = "one\r\ntwo\r\nthree\r\nfour\r\nfive\r\nsix\r\n"
    by_diff = apply_patches(template, [{"kind": "unified-diff", "diff": DIFF}])
    assert by_diff == "one\r\n2\r\nthree\r\nfour\r\n5\r\n5b\r\nsix\r\n"
    replaced: list[Json] = [{"kind": "replace", "old": "two\nthree", "new": "2\n3"}]
    assert apply_patches(template, replaced).startswith("one\r\n2\r\n3\r\nfour")


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\f", "\v", "\x1c"])
def test_a_diff_may_hold_characters_that_break_lines_elsewhere(inside: str) -> None:
    """Only line feeds end the lines of a diff."""
    diff = f"@@ -1,2 +1,2 @@\n a{inside}b\n-two\n+2\n"
    patched = apply_patches(f"a{inside}b\ntwo\n", [{"kind": "unified-diff", "diff": diff}])
    assert patched == f"a{inside}b\n2\n"


@pytest.mark.parametrize(
    ("patches", "words"),
    [
        ([], "a list of patches"),
        ([{"kind": "magic"}], "one of set-default"),
        ([{"kind": "set-default", "variable": "a b", "value": 1}], "variable"),
        ([{"kind": "set-default", "variable": "a", "value": []}], "value"),
        ([{"kind": "set-default", "variable": "a"}], "lacks value"),
        ([{"kind": "set-default", "variable": "a", "value": "x\n"}], "value"),
        ([{"kind": "coerce-unknown", "variable": "a", "allowed": [], "value": 1}], "allowed"),
        ([{"kind": "reasoning-effort-lenient", "level": 1}], "unknown fields: level"),
        ([{"kind": "replace", "old": "", "new": "x"}], "old"),
        ([{"kind": "unified-diff", "diff": "hello"}], "not a unified diff"),
        ([{"kind": "unified-diff", "diff": "@@ -1,2 +1,2 @@\n one\n"}], "cut short"),
    ],
)
def test_wrong_patches_name_their_field(patches: list[Json], words: str) -> None:
    """Refused before any template is there, with the field and what it wants."""
    with pytest.raises(InvalidDerivation, match=words):
        check_patches(patches)


def report(before: str, after: str) -> list[Json]:
    """The rendering report over the whole matrix."""
    rows = conversations()
    return compare(render(before, rows), render(after, rows))  # type: ignore[arg-type]


def test_the_report_shows_each_conversation_before_and_after() -> None:
    """Every row of the matrix, with the difference where there is one."""
    rows = {row["conversation"]: row for row in report(STRICT, apply_patches(STRICT, LENIENT))}  # type: ignore[call-overload,index]
    assert set(rows) == set(conversations())
    assert rows["effort-bogus"]["before"]["ok"] is False
    assert rows["effort-bogus"]["after"]["ok"] is True
    assert rows["plain"]["changed"] is True
    assert "-<s>[none]" in rows["plain"]["diff"]
    assert rows["effort-none"]["changed"] is False


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{- bos_token -}}{% for m in messages %}{{ m.content }}{% endfor %}", "braces"),
        ("{{ bos_token }}", "user's text is missing"),
        (STRICT.replace("[{{", "\\\\n[{{"), "backslash-n"),
        ("{% if %}", "syntax error"),
        ("{{ raise_exception('no') }}", "refused by the template: no"),
    ],
)
def test_a_patched_template_that_is_broken_is_refused(template: str, words: str) -> None:
    """Text that only looks like a template, a lost message, a leaked escape: no object."""
    with pytest.raises(PatchFails, match=words):
        report(STRICT, template)


def test_a_row_that_worked_before_must_work_after() -> None:
    """A patch may not cost what the original could do, on any row."""
    broken = STRICT + "{% if tools is defined %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(PatchFails, match="conversation tools: refused by the template: no tools"):
        report(STRICT, broken)


def test_the_templates_own_fault_is_not_the_patchs() -> None:
    """A template that failed before its patch too is named as the cause."""
    broken = "{% if %}"
    with pytest.raises(PatchFails, match="the template itself fails") as caught:
        report(broken, broken)
    assert "correct the patch" not in caught.value.remedy


def test_generation_marks_are_inert() -> None:
    """Templates for training mark what the assistant wrote; the marks print nothing."""
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    plain = conversations()["plain"]
    assert render(template, {"plain": plain}) == {"plain": {"output": USER_TEXT}}


def test_templates_get_what_they_are_written_for() -> None:
    """strftime_now, raise_exception, loop controls, tojson without sorting or escaping."""
    template = (
        "{{ strftime_now('%Y') }} {{ {'b': '<é>', 'a': 1} | tojson }} "
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(template, {"x": {}}) == {"x": {"output": '2024 {"b": "<é>", "a": 1} 13'}}


def test_tojson_takes_the_arguments_of_transformers() -> None:
    """ensure_ascii, indent, separators and sort_keys, in this order or by name."""
    value: Json = {"b": ["<é&'>"], "a": 1}
    rows: dict[str, dict[str, Json]] = {"plain": {"value": value}}
    cases = {
        "{{ value|tojson }}": json.dumps(value, ensure_ascii=False),
        "{{ value|tojson(separators=(',', ':')) }}": '{"b":["<é&\'>"],"a":1}',
        "{{ value|tojson(sort_keys=true) }}": '{"a": 1, "b": ["<é&\'>"]}',
        "{{ value|tojson(true) }}": json.dumps(value),
        "{{ value|tojson(indent=2) }}": json.dumps(value, ensure_ascii=False, indent=2),
        "{{ value|tojson(false, 2) }}": json.dumps(value, ensure_ascii=False, indent=2),
    }
    for template, output in cases.items():
        assert render(template, rows)["plain"] == {"output": output}, template


def test_templates_cannot_reach_python() -> None:
    """The sandbox refuses the way out; output has an end."""
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    flood = "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}"
    found = render(escape, {"x": {}})["x"], render(flood, {"x": {}})["x"]
    assert "unsafe" in str(found[0])
    assert "renders more than" in str(found[1])


def test_every_patch_says_what_it_changes() -> None:
    """The words that the panel shows."""
    assert "omitted → high" in describe({"kind": "reasoning-effort-lenient"})
    assert describe({"kind": "set-default", "variable": "v", "value": "x"}).startswith("v is 'x'")
