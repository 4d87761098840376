"""Every column of the records is read somewhere: what nobody reads is not kept."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from django.apps import apps

import deployments

ROOT = Path(deployments.__file__).parent.parent
MODELS = ROOT / "deployments" / "models.py"
OWN = {
    "id",
    "password",
    "session_data",
    "first_name",
    "last_name",
    "date_joined",
    "user_permissions",
}
"""Django's own columns, which Django reads."""
WAIVED: dict[str, str] = {
    "GateSpool.updated_at": "for whoever looks at the database by hand while a gate lags behind",
    "Replica.stopped_at": "history, shown by Django's admin: when an engine ended",
}
"""`Model.column`: why it is kept although no code reads it."""


@cache
def read_names() -> frozenset[str]:
    """Names that the product reads: attributes, keywords of queries, names in strings, templates."""
    found: set[str] = set()
    for path in (*ROOT.glob("deployments/**/*.py"), *ROOT.glob("mmadmin/**/*.py")):
        if "migrations" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(node.value.removeprefix("-").split("__"))
            elif isinstance(node, ast.Call):
                found |= _looked_up(node)
            elif isinstance(node, ast.ClassDef) and node.name.endswith(("Out", "Brief")):
                fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
                found.update(n.id for n in fields if isinstance(n, ast.Name))
    for path in ROOT.glob("templates/**/*.html"):
        text = path.read_text(encoding="utf-8")
        found.update(part for word in text.split() for part in word.replace("|", ".").split("."))
    return frozenset(found)


LOOKS_UP = {"filter", "exclude", "get", "get_or_create", "update_or_create", "only", "order_by"}


def _looked_up(call: ast.Call) -> set[str]:
    """Fields that a query asks by; those that it sets are not read."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    if name not in LOOKS_UP | {"Q", "F"}:
        return set()
    return {part for keyword in call.keywords for part in (keyword.arg or "").split("__")}


COLUMNS = [
    (model.__name__, field.name)
    for model in apps.get_app_config("deployments").get_models()
    for field in model._meta.get_fields()
    if getattr(field, "column", None) and field.name not in OWN
]


@pytest.mark.parametrize(("model", "column"), COLUMNS)
def test_a_column_is_read(model: str, column: str) -> None:
    """By its name anywhere in the product, or it says here why it is kept."""
    waived = f"{model}.{column}" in WAIVED
    assert (column in read_names()) != waived, f"{model}.{column}"
