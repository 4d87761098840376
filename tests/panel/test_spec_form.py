"""The form writes into the file what was changed, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import spec_form
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.spec import parse_spec
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


def test_nonsense_is_named_by_the_parser() -> None:
    """A word where a number belongs goes into the file, and the file's parser says so."""
    after = spec_form.write(FILES[0], {"f:serve.slots": "many"})
    error = spec_form.problem(after)
    assert error is not None
    assert error.details["field"] == "serve.slots"


def test_what_is_not_toml_is_refused() -> None:
    """There is no form of a broken file."""
    with pytest.raises(InvalidSpec, match="not TOML"):
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
