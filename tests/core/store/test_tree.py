"""What an object may hold, and its hash."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.errors import StepFailed, StoreCorrupt
from mmadmin.core.store.tree import (
    Entry,
    check_path,
    entry_from_json,
    fixed_entries,
    object_hash,
    scan,
)

GOLDEN = (
    Entry("bin", "dir"),
    Entry("bin/server", executable=True, size=3, sha256="a" * 64),
    Entry("model.gguf", size=70_000_000_000, sha256="b" * 64),
    Entry("server", "link", target="bin/server"),
)


def test_the_golden_object_hash_never_changes() -> None:
    """The hash of an object is the committed one, in whatever order its entries come."""
    want = "27621974bdb3dcdc5cf1ad65a523b7bdacac48679cd5bb610bb0bade949f56c7"
    assert object_hash(GOLDEN) == want
    assert object_hash(reversed(GOLDEN)) == want


@pytest.mark.parametrize(
    "change", [{"path": "x"}, {"executable": True}, {"size": 1}, {"sha256": "c" * 64}]
)
def test_everything_that_matters_is_in_the_hash(change: dict[str, object]) -> None:
    """Path, permission, size and bytes are identity."""
    one = Entry("a", size=5, sha256="a" * 64)
    other = Entry(**{"path": "a", "size": 5, "sha256": "a" * 64, **change})  # type: ignore[arg-type]
    assert object_hash([one]) != object_hash([other])


def test_pinned_files_bring_their_folders() -> None:
    """An object known beforehand has the hash of the object that is then made."""
    files = [FixedFile("a/b/c", "a" * 64, 3), FixedFile("d", "b" * 64, 4, executable=True)]
    assert [(e.path, e.kind) for e in fixed_entries(files)] == [
        ("a", "dir"),
        ("a/b", "dir"),
        ("a/b/c", "file"),
        ("d", "file"),
    ]


@given(st.sampled_from(GOLDEN))
def test_entries_survive_their_data(entry: Entry) -> None:
    """An entry written as data is the same entry when it is read."""
    assert entry_from_json(entry.as_json()) == entry


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"path": "a"},
        {"path": "a", "type": "pipe"},
        {"path": "../a", "type": "dir"},
        {"path": "a", "type": "file", "executable": False, "size": 1, "sha256": "A" * 64},
        {"path": "a", "type": "file", "executable": False, "size": -1, "sha256": "a" * 64},
        {"path": "a", "type": "file", "executable": 1, "size": 1, "sha256": "a" * 64},
        {
            "path": "a",
            "type": "file",
            "executable": False,
            "size": 1,
            "sha256": "a" * 64,
            "mode": 7,
        },
        {"path": "a", "type": "link"},
        {"path": "a", "type": "dir", "size": 1},
    ],
)
def test_damaged_entries_are_refused(data: object) -> None:
    """Records with unknown or missing fields are corrupt."""
    with pytest.raises(StoreCorrupt):
        entry_from_json(data)


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0"])
def test_paths_stay_inside(path: str) -> None:
    """No path of an object can name a place outside it."""
    with pytest.raises(StoreCorrupt):
        check_path(path)


def test_scan_tells_files_folders_and_links(tmp_path: Path) -> None:
    """Everything is found once, sorted, with what matters about it."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x").write_text("x")
    (tmp_path / "b/x").chmod(0o700)
    (tmp_path / "a").symlink_to("b/x")
    (tmp_path / "dangling").symlink_to("b/nothing")
    assert [
        (f.path, f.kind, f.executable, f.target) for f in scan(tmp_path) if f.kind != "link"
    ] == [
        ("b", "dir", True, ""),
        ("b/x", "file", True, ""),
    ]
    assert [(f.path, f.target) for f in scan(tmp_path) if f.kind == "link"] == [
        ("a", "b/x"),
        ("dangling", "b/nothing"),
    ]


@pytest.mark.parametrize("target", ["/etc/passwd", "../x", "b/../../x", "up/x"])
def test_links_may_not_leave(tmp_path: Path, target: str) -> None:
    """Neither absolute, nor upwards, nor through another link."""
    out = tmp_path / "out"
    (out / "b").mkdir(parents=True)
    if target == "up/x":
        (tmp_path / "x").write_text("secret")
        (out / "b/up").symlink_to("..")  # stays inside by itself
        (out / "link").symlink_to("b/up/../x")
    else:
        (out / "link").symlink_to(target)
    with pytest.raises(StepFailed, match="leaves the object"):
        scan(out)


def test_special_files_are_refused(tmp_path: Path) -> None:
    """Pipes, sockets, and setuid files are no output."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StepFailed, match="device, socket or pipe: pipe"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
    with pytest.raises(StepFailed, match="socket"):
        scan(tmp_path)
    (tmp_path / "s").unlink()
    for mode in (0o4755, 0o2755):
        (tmp_path / "suid").write_text("x")
        (tmp_path / "suid").chmod(mode)
        with pytest.raises(StepFailed, match="setuid"):
            scan(tmp_path)


def test_names_must_be_text(tmp_path: Path) -> None:
    """A name that is not UTF-8 has no canonical form."""
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))).write_text("x")
    with pytest.raises(StepFailed, match="UTF-8"):
        scan(tmp_path)
