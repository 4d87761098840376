"""`mm store push` and `pull` with a bucket, as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmadmin.cli.store import app
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.store import Store, StoreObject
from tests.cli.test_store import mm, mm_json, model, store
from tests.core.workshop import damage
from tests.support.caches import CANARY, bucket_cache, s3, s3_endpoint

__all__ = ["model", "s3", "s3_endpoint", "store"]


@pytest.fixture
def address(s3: str) -> str:
    """An empty bucket's address."""
    bucket = bucket_cache(s3).writer.bucket  # type: ignore[attr-defined]
    return f"s3://{bucket.name}/team?endpoint={s3}&region=us-east-1"


def test_push_and_pull(
    store: Store,
    model: StoreObject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
) -> None:
    """Signed, sent once, pulled whole elsewhere; no secret is printed or written down."""
    mm("key", "gpu-1")
    said = mm("push", address, "system")
    assert "2 files sent" in said
    assert "signed by gpu-1" in said
    again = mm_json("push", address, "system")
    assert (again["objects"], again["blobs"], again["sent_bytes"]) == (2, 0, 0)
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    monkeypatch.setenv("MM_HOME", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "substituters.json").write_text(json.dumps({"caches": [address]}))
    said += mm("pull", system)
    other = Store(tmp_path / "other/store")
    assert other.closure(system) == store.closure(system)
    assert damage(other) == []
    assert CANARY not in said
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []


def test_what_goes_wrong_meanwhile_is_no_data(
    store: Store, model: StoreObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """A cache that is not there is said on stderr; stdout has one JSON document all the same."""
    mm("push", address, "model")
    gone = address.replace("s3://", "s3://no-such-", 1)
    monkeypatch.setenv("MM_HOME", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/substituters.json").write_text(json.dumps({"caches": [gone, address]}))
    done = CliRunner().invoke(app, ["pull", model.name, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["name"] == model.name
    assert "no-such-" in done.stderr
    assert "not found" in done.stderr
    with pytest.raises(NotFound, match=r"no-such-.*, s3://"):
        mm("pull", f"{'0' * 64}-nothing")


def test_http_is_not_pushed_to(store: Store, model: StoreObject) -> None:
    """What can be pushed to is said."""
    with pytest.raises(InvalidInput, match="s3://"):
        mm("push", "https://cache.example.org", "model")
