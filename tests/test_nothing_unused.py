"""What mmadmin offers is used: every field of a deployment file and every setting is read somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mmadmin.core import catalog
from mmadmin.core.spec.tables import sections_of
from mmadmin.core.variables import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
DECLARED = {"tables.py", "fields.py", "variables.py"}
"""Files that only declare fields and settings."""
BY_LIBRARIES = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE")
"""Variables that a library reads: obstore, httpx2."""
BY_TESTS = {"MM_TEST_CACHE"}


def product_files() -> Iterator[Path]:
    """The product's code, without what only declares."""
    for room in ("mmadmin", "deployments"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name not in DECLARED and "migrations" not in path.parts:
                yield path
    yield ROOT / "manage.py"


@cache
def read_names() -> frozenset[str]:
    """Every attribute that is read, every key and every text, without docstrings."""
    found: set[str] = set()
    for path in product_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                # `(a - b).days` is a library's attribute, not a field of ours
                if not isinstance(node.value, ast.BinOp):
                    found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@pytest.mark.parametrize(
    "dotted",
    sorted(
        {
            f"{section}.{field.name}"
            for engine in catalog.engines().values()
            for section, fields in sections_of(engine).items()
            for field in fields
            if not field.flag
        }
    ),
)
def test_fields_of_a_deployment_file_are_read(dotted: str) -> None:
    """A field that is neither read nor a command-line flag is a promise that is not kept."""
    assert dotted.rpartition(".")[2] in read_names()


def test_settings_are_read() -> None:
    """Every variable that the documentation lists is read by the code."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in product_files())
    assert not [
        name
        for name in VARIABLES
        if not name.startswith(BY_LIBRARIES)
        and name not in BY_TESTS
        and f'"{name}"' not in text
        and f'"{name.removeprefix("MM_").lower()}"' not in text
    ]
