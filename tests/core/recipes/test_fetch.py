"""fetch: pinned files from every kind of source."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import HubSource, IndexSource, Json, PathSource, UrlSource
from mmadmin.core.errors import DigestMismatch, InvalidDerivation, SourceMissing
from mmadmin.core.recipes.fetch import RECIPE, source_from_json
from tests.support.hub import local_hub
from tests.support.tools import attempt

DATA = b"content " * 1000
SHA = hashlib.sha256(DATA).hexdigest()


def files(source: dict[str, Json], **changes: Json) -> dict[str, Json]:
    """Params for one file."""
    pin: dict[str, Json] = {"path": "a/b.bin", "sha256": SHA, "size": len(DATA), "source": source}
    return {"files": [{**pin, **changes}]}


def test_a_local_file_is_copied_and_its_digest_handed_on(tmp_path: Path) -> None:
    """The bytes, room claimed beforehand, and no second reading needed."""
    source = tmp_path / "source.bin"
    source.write_bytes(DATA)
    work = attempt(tmp_path / "work")
    out = work.build(RECIPE, files({"kind": "path", "path": str(source)}))
    assert (out / "a/b.bin").read_bytes() == DATA
    assert work.tools.known == {"a/b.bin": SHA}
    assert work.staging.reserved == len(DATA)


def test_progress_is_that_of_all_files_together(tmp_path: Path) -> None:
    """Two files, one bar: it never starts over and ends full."""
    (tmp_path / "source.bin").write_bytes(DATA)
    one = files({"kind": "path", "path": str(tmp_path / "source.bin")})["files"][0]  # type: ignore[index]
    work = attempt(tmp_path / "work")
    work.build(RECIPE, {"files": [one, {**one, "path": "c"}]})  # type: ignore[dict-item]
    done = [part for part, _total, _unit in work.progress]
    assert done == sorted(done)
    assert {total for _part, total, _unit in work.progress} == {2 * len(DATA)}
    assert work.progress[-1] == (2 * len(DATA), 2 * len(DATA), "bytes")


def test_an_address_is_fetched(tmp_path: Path) -> None:
    """A plain HTTP address works like every other source."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        out = attempt(tmp_path).build(RECIPE, files({"kind": "url", "url": f"{hub.url}/x.bin"}))
    assert (out / "a/b.bin").read_bytes() == DATA


def test_a_file_address_is_read_from_the_disk(tmp_path: Path) -> None:
    """Also one whose path needs quoting, as links of a local package folder do."""
    (tmp_path / "with space").mkdir()
    source = tmp_path / "with space/x.bin"
    source.write_bytes(DATA)
    out = attempt(tmp_path / "w").build(RECIPE, files({"kind": "url", "url": source.as_uri()}))
    assert "%20" in source.as_uri()
    assert (out / "a/b.bin").read_bytes() == DATA


def test_what_the_store_has_is_linked_not_fetched(tmp_path: Path) -> None:
    """With the bytes in the store, no source is asked at all."""
    blob = tmp_path / "blob"
    blob.write_bytes(DATA)
    work = attempt(tmp_path / "work")
    work.staging.blobs[SHA] = blob
    out = work.build(RECIPE, files({"kind": "url", "url": "http://127.0.0.1:9/x"}))
    assert (out / "a/b.bin").samefile(blob)


def test_making_a_linked_file_executable_leaves_the_store_alone(tmp_path: Path) -> None:
    """The bit is set on a copy: a blob's mode is not ours to change."""
    blob = tmp_path / "blob"
    blob.write_bytes(DATA)
    blob.chmod(0o444)
    work = attempt(tmp_path / "work")
    work.staging.blobs[SHA] = blob
    source: dict[str, Json] = {"kind": "url", "url": "http://127.0.0.1:9/x"}
    out = work.build(RECIPE, files(source, executable=True))
    assert (out / "a/b.bin").stat().st_mode & 0o111
    assert blob.stat().st_mode & 0o777 == 0o444


def test_a_local_file_that_is_not_as_pinned_is_refused(tmp_path: Path) -> None:
    """Size and digest are compared; a missing file is said."""
    source = tmp_path / "source.bin"
    source.write_bytes(DATA)
    params = {"kind": "path", "path": str(source)}
    with pytest.raises(DigestMismatch, match="8000 bytes where the pin says 7"):
        attempt(tmp_path / "work").build(RECIPE, files(params, size=7))
    with pytest.raises(DigestMismatch) as caught:
        attempt(tmp_path / "work").build(RECIPE, files(params, sha256="0" * 64))
    assert caught.value.details["actual"] == SHA
    assert Path(caught.value.details["path"]).read_bytes() == DATA
    with pytest.raises(SourceMissing, match="No such file"):
        attempt(tmp_path / "work").build(RECIPE, files({"kind": "path", "path": "/nonexistent"}))


def test_the_output_is_known_from_the_pins_alone() -> None:
    """Two sources, one output."""
    one = RECIPE.fixed_output(files({"kind": "url", "url": "https://a.invalid/x"}))
    two = RECIPE.fixed_output(files({"kind": "path", "path": "/x"}))
    assert one == two
    assert one is not None
    assert (one[0].path, one[0].sha256, one[0].size) == ("a/b.bin", SHA, len(DATA))


def test_sources_are_read_from_their_json() -> None:
    """Each kind of source, as a lock writes it."""
    hub = {"kind": "hub", "repo": "a/b", "revision": "0" * 40, "path": "c"}
    assert source_from_json(hub) == HubSource("a/b", "0" * 40, "c")  # type: ignore[arg-type]
    index = {"kind": "index", "project": "p", "version": "1", "filename": "p-1.whl"}
    assert source_from_json(index) == IndexSource("p", "1", "p-1.whl")  # type: ignore[arg-type]
    assert source_from_json({"kind": "url", "url": "https://x.invalid"}) == UrlSource(
        "https://x.invalid"
    )
    assert source_from_json({"kind": "path", "path": "/x"}) == PathSource("/x")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "lacks files"),
        ({"files": []}, "at least one file"),
        (files({"kind": "ftp"}), "one of hub, index, url, path"),
        (files({"kind": "url", "url": "ftp://x"}), "http, https or file"),
        (files({"kind": "path", "path": "x"}), "absolute path"),
        (files({"kind": "hub", "repo": "a/b", "revision": "main", "path": "c"}), "40-hex commit"),
        (files({"kind": "path", "path": "/x"}, sha256="ABC"), "64 lower-case hex"),
        (files({"kind": "path", "path": "/x"}, size=-1), "at least 0"),
        (files({"kind": "path", "path": "/x"}, size=True), "whole number"),
        (files({"kind": "path", "path": "/x"}, path="../up"), "plain relative path"),
        (files({"kind": "path", "path": "/x"}, path="/abs"), "plain relative path"),
        (files({"kind": "path", "path": "/x"}, colour="red"), "unknown fields: colour"),
        ({"files": files({"kind": "path", "path": "/x"})["files"] * 2}, "each path once"),  # type: ignore[operator]
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Refused before anything is fetched."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)
