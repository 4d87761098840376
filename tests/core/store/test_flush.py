"""What a power cut must not lose is flushed before it counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmadmin.core.store import Store, index
from tests.core.workshop import add


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every flush, link and rename of the test, in order."""
    seen: list[str] = []
    link, rename = os.link, Path.rename

    def fsync(fd: int) -> None:
        seen.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")  # noqa: PTH115

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        seen.append(f"link {Path(target).name[:4]}")

    def renaming(self: Path, target: Path) -> Path:
        seen.append(f"rename {self.name} → {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", linking)
    monkeypatch.setattr(Path, "rename", renaming)
    return seen


def test_files_are_flushed_before_links_and_folders_before_the_record(
    tmp_path: Path, calls: list[str]
) -> None:
    """Bytes, then names, then the folder, then its record, then the row."""
    store = Store(
        tmp_path / "store", floor_bytes=0, after=lambda step: calls.append(f"step {step}")
    )
    found = add(store, "x", {"d/file": b"content"})
    blob = found.files[1].sha256

    def at(call: str) -> int:
        return calls.index(call)

    order = [
        at("flush file"),
        at(f"link {blob[:4]}"),
        at(f"flush {blob[:2]}"),
        at("flush d"),
        at(f"rename out → {found.name}"),
        at(f"flush {found.name}"),
        at(
            f"rename {next(c for c in calls if c.endswith(f'{found.name}.json')).split()[1]} → {found.name}.json"
        ),
        at("step described"),
        at("step indexed"),
    ]
    assert order == sorted(order)
    described = calls[order[6] : order[7]]
    assert "flush objects" in described


def test_every_file_and_folder_is_flushed_and_an_error_ends_the_commit(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait at a time; a disk that cannot write makes no object."""
    store = Store(tmp_path / "store", floor_bytes=0)
    files = {f"d{n % 7}/file{n}": b"%d" % n for n in range(100)}
    add(store, "x", files)
    flushed = {call.removeprefix("flush ") for call in calls if call.startswith("flush ")}
    assert {path.partition("/")[2] for path in files} <= flushed
    assert {f"d{n}" for n in range(7)} <= flushed
    before = store.names()

    def fsync(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == "file77":  # noqa: PTH115
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        add(store, "y", {**files, "more": b"x"})
    assert store.names() == before


def test_the_index_is_flushed_at_every_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The product's setting is WAL with `synchronous=FULL` (2)."""
    monkeypatch.undo()
    monkeypatch.setattr(index, "SYNCHRONOUS", "FULL")
    store = Store(tmp_path / "store")
    assert store.index.row("PRAGMA synchronous") == (2,)
    assert store.index.row("PRAGMA journal_mode") == ("wal",)
    source = Path(index.__file__).read_text()
    assert 'SYNCHRONOUS = "FULL"' in source
