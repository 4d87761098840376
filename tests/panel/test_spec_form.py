"""The form writes into the file what was changed, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.panel import spec_form
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.spec.spec import parse_spec
from tests.panel import seed

FILES = [
    seed.smol_spec(engine="11434.0.0"),
    seed.mistral_spec(quant="Q4_K_M", engine="11434.0.0", slots=1),
]


def values(text: str) -> dict[str, str]:
    """What a browser would send for an untouched form."""
    return {
        field.name: field.value
        for section in spec_form.sections(text)
        for field in (*section.fields, *section.more)
    }


@pytest.mark.parametrize("text", FILES)
def test_an_untouched_form_changes_nothing(text: str) -> None:
    """Every byte stays, comments and order too."""
    assert spec_form.write(text, values(text)) == text


def test_one_field_changes_one_line() -> None:
    """The other lines stay as they were."""
    text = FILES[0]
    after = spec_form.write(text, values(text) | {"f:serve.context": "2048"})
    changed = [b for a, b in zip(text.splitlines(), after.splitlines(), strict=True) if a != b]
    assert changed == ["context = 2048"]


def test_an_emptied_field_goes() -> None:
    """No value, no key: the default holds."""
    after = spec_form.write(FILES[0], {"f:serve.top_p": ""})
    assert "top_p" not in after


def test_a_new_key_of_no_table_stands_on_top() -> None:
    """It must not fall into the last table."""
    after = spec_form.write(FILES[0], {"f:host": "v100-box"})
    assert parse_spec(after).host == "v100-box"


def test_another_source_drops_the_keys_of_the_old_one() -> None:
    """Keys that the new source does not have would be refused."""
    after = spec_form.write(
        FILES[0], {"f:model.source": "path", "f:model.path": "/srv/model-Q8_0.gguf"}
    )
    # The path's field is not in the form before the source is chosen, but is taken all the same.
    assert parse_spec(after).model.path == "/srv/model-Q8_0.gguf"


def test_the_lenient_patch_comes_and_goes() -> None:
    """A tick box for the patch that most people need."""
    on = spec_form.write(FILES[0], {f"f:{spec_form.PATCH}": "true"})
    assert [p["kind"] for p in parse_spec(on).template.patches] == [spec_form.LENIENT]
    off = spec_form.write(on, {f"f:{spec_form.PATCH}": ""})
    assert parse_spec(off).template.patches == ()


RULE = "context-beyond-training"


def test_a_warning_is_overruled_and_no_longer() -> None:
    """The reason goes into a table of its own, and with the last one the table goes."""
    name = f"f:activation.overrule.{RULE}"
    on = spec_form.write(FILES[0], {name: "tried with “rope” scaling"})
    assert parse_spec(on).activation.overrule == {RULE: "tried with “rope” scaling"}
    assert values(on)[name] == "tried with “rope” scaling"
    assert spec_form.write(on, values(on)) == on
    other = spec_form.write(on, {name: "measured"})
    assert parse_spec(other).activation.overrule == {RULE: "measured"}
    assert spec_form.write(other, {name: " "}).rstrip() == FILES[0].rstrip()


def test_overruling_leaves_the_rest_of_the_table() -> None:
    """What stands in [activation] stays, also when the reason goes."""
    text = FILES[0] + '\n[activation]\nmode = "swap" # while the cards are full\n'
    name = f"f:activation.overrule.{RULE}"
    on = spec_form.write(text, {name: "measured"})
    assert (parse_spec(on).activation.mode, len(parse_spec(on).activation.overrule)) == ("swap", 1)
    off = spec_form.write(on, {name: ""})
    assert "# while the cards are full" in off
    assert parse_spec(off) == parse_spec(text)


def test_a_rule_s_words_stand_beside_its_field() -> None:
    """In general, or with the figures of a warning that was given; its remedy too."""
    (going_live,) = (s for s in spec_form.sections(FILES[0]) if s.name == "activation")
    (field,) = (f for f in going_live.fields if f.key.endswith(RULE))
    assert "{" not in field.help
    assert "use a smaller context" in field.help
    told = {RULE: "a request may use 65536 tokens, the model was trained with 8192"}
    (going_live,) = (s for s in spec_form.sections(FILES[0], told) if s.name == "activation")
    (field,) = (f for f in going_live.fields if f.key.endswith(RULE))
    assert field.help.startswith("A request may use 65536 tokens")
    assert not any("fp8" in f.key for f in going_live.fields), "a rule of another engine"


@pytest.mark.parametrize("reason", ['""', "7"])
def test_a_reason_that_is_none_is_named(reason: str) -> None:
    """The parser's word is about the rule's own field."""
    error = spec_form.problem(f"{FILES[0]}\n[activation.overrule]\n{RULE} = {reason}\n")
    assert error is not None
    assert error.details["field"] == f"activation.overrule.{RULE}"


@pytest.mark.parametrize("table", ["[activation]\noverrule = 7", "activation = 7"])
def test_an_overrule_that_is_no_table(table: str) -> None:
    """The form still shows; the parser says what is wrong."""
    text = table + "\n" + FILES[0] if table.startswith("activation") else f"{FILES[0]}\n{table}\n"
    assert spec_form.sections(text)
    assert spec_form.write(text, values(text)) == text
    assert spec_form.problem(text) is not None
    assert spec_form.write(text, {f"f:activation.overrule.{RULE}": "measured"})


def test_nonsense_is_named_by_the_parser() -> None:
    """A word where a number belongs goes into the file, and the file's parser says so."""
    after = spec_form.write(FILES[0], {"f:serve.slots": "many"})
    error = spec_form.problem(after)
    assert error is not None
    assert error.details["field"] == "serve.slots"


def test_what_is_not_toml_is_refused() -> None:
    """There is no form of a broken file."""
    with pytest.raises(InvalidSpec, match="invalid TOML"):
        spec_form.sections("name = ")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_any_text_comes_back_as_it_was_typed(text: str) -> None:
    """Quotes, backslashes and signs survive the file."""
    after = spec_form.write(FILES[0], {"f:description": text})
    assert parse_spec(after).description == text.strip()


@pytest.mark.parametrize("text", ["a = " + "[" * 5000 + "]" * 5000, f"a = {'9' * 5000}"])
def test_a_hostile_text_is_refused_in_words(text: str) -> None:
    """What the reader itself stumbles over is the author's error."""
    with pytest.raises(InvalidSpec):
        spec_form.sections(text)
