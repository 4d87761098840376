"""`mm import`: what it takes over, and what it refuses before it takes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.models import Generation, User
from mmadmin.cli.main import app
from mmadmin.core.errors import InvalidInput
from mmadmin.core.store import Store
from mmadmin.core.store.bundle import export_bundle
from tests.core.generations.test_record_check import RECORD
from tests.core.workshop import add

pytestmark = pytest.mark.django_db


def exported(tmp_path: Path, **other: Any) -> Path:
    """A bundle of a system whose record says `other`."""
    store = Store(tmp_path / "elsewhere", floor_bytes=0)
    system = add(store, "system", {"manifest.json": b"{}"})
    export_bundle(store, system.name, tmp_path / "bundle", extra={**RECORD, **other})
    return tmp_path / "bundle"


@pytest.mark.parametrize("field", ["command", "host_facts", "lock", "renders", "size_bytes"])
def test_a_bundle_with_a_field_of_a_wrong_type_is_not_imported(
    alice: User, tmp_path: Path, field: str
) -> None:
    """The field is named; neither the history nor the store has anything of it."""
    done = CliRunner().invoke(app, ["import", str(exported(tmp_path, **{field: "wrong"}))])
    assert isinstance(done.exception, InvalidInput)
    assert done.exception.details["field"] == field
    assert not Generation.objects.exists()
    assert Store(tmp_path / "store").names() == []


def test_a_bundle_is_imported_as_a_built_generation(alice: User, tmp_path: Path) -> None:
    """With everything that its record says."""
    done = CliRunner().invoke(app, ["import", str(exported(tmp_path))], catch_exceptions=False)
    assert done.exit_code == 0
    made = Generation.objects.get()
    assert (made.state, made.report("command")) == ("built", RECORD["command"])
    assert Store(tmp_path / "store").names() == [made.system]
