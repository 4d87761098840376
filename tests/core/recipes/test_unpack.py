"""unpack: what is wanted out of an archive, and nothing that a hostile one tries."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import DigestMismatch, DiskFull, InvalidDerivation, InvalidInput
from mmadmin.core.recipes import unpack
from mmadmin.core.recipes.unpack import RECIPE, HostileArchive
from tests.support.tools import NoTools

BIGGER = 1 << 20
BIG = bytes(range(256)) * 8192


def tar(folder: Path, *entries: tarfile.TarInfo | tuple[str, bytes], form: str = "gz") -> Path:
    """An object folder with a tar of these entries."""
    folder.mkdir(parents=True)
    with tarfile.open(folder / "a.tar.gz", f"w:{form}") as made:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                made.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                info.mode = 0o755 if entry[0].endswith(".sh") else 0o644
                made.addfile(info, io.BytesIO(entry[1]))
    return folder


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A link, device or pipe."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def zipped(folder: Path, **files: bytes) -> Path:
    """An object folder with a zip; __ stands for / and _dot_ for a dot."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "a.whl", "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in files.items():
            made.writestr(name.replace("__", "/").replace("_dot_", "."), data)
    return folder


def build(tmp_path: Path, archive: Path, params: dict[str, Json]) -> tuple[Path, NoTools]:
    """Unpack into a fresh folder."""
    RECIPE.check(params)
    out = tmp_path / "out"
    out.mkdir()
    tools = NoTools(tmp_path)
    RECIPE.build(params, {"archive": archive}, out, tools)
    return out, tools


def tree(folder: Path) -> dict[str, bytes]:
    """Path → content."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_room_is_set_aside_before_anything_is_written(tmp_path: Path) -> None:
    """Exactly what a zip's members take; several times its size for a tar."""
    archive = zipped(tmp_path / "zip", model_dot_gguf=BIG, other=b"no")
    _out, tools = build(tmp_path, archive, {"members": ["model.gguf"]})
    assert tools.reserved == len(BIG)
    packed = tar(tmp_path / "tar", ("a", b"1"))
    (tmp_path / "again").mkdir()
    _out, tools = build(tmp_path / "again", packed, {"subtree": ""})
    assert tools.reserved >= (packed / "a.tar.gz").stat().st_size


class SmallDisk(NoTools):
    """Tools of a disk that has no more than a megabyte to promise."""

    def reserve(self, size_bytes: int) -> None:
        """Promise it, or not."""
        if size_bytes > 1 << 20:
            raise DiskFull("disk full")
        super().reserve(size_bytes)


@pytest.mark.parametrize("count", [1, 40])
def test_a_tar_that_grows_beyond_its_room_has_to_reserve_more(tmp_path: Path, count: int) -> None:
    """What packs a thousand times smaller than it is cannot fill a disk that it was not promised."""
    member = bytes(40 * BIGGER // count)
    archive = tar(tmp_path / "in", *((f"zeros{n}", member) for n in range(count)), form="xz")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DiskFull):
        RECIPE.build({"subtree": ""}, {"archive": archive}, out, SmallDisk(tmp_path))
    assert sum(map(len, tree(out).values())) <= 1 << 20
    (tmp_path / "roomy").mkdir()
    _out, tools = build(tmp_path / "roomy", archive, {"subtree": ""})
    assert tools.reserved >= 40 * BIGGER


@pytest.mark.parametrize(
    "entries",
    [
        (("eng/a", b"1"), ("eng/a/b", b"2")),
        (("eng/a/b", b"2"), ("eng/a", b"1")),
        (("x" * 300, b"1"),),
        (("d/" + "x" * 300 + "/f", b"1"),),
        (special("link", tarfile.SYMTYPE, "x" * 5000),),
        (special("link", tarfile.SYMTYPE, ""),),
    ],
    ids=["below a file", "over a folder", "long name", "long folder", "long target", "no target"],
)
def test_what_no_file_can_be_made_of_is_refused(tmp_path: Path, entries: Any) -> None:
    """The file system's own refusals are those of the archive, and name the member."""
    with pytest.raises(HostileArchive) as refused:
        build(tmp_path, tar(tmp_path / "in", *entries), {"subtree": ""})
    name = entries[-1].name if isinstance(entries[-1], tarfile.TarInfo) else entries[-1][0]
    assert name[:40] in refused.value.message


def test_members_come_flat_with_their_digests(tmp_path: Path) -> None:
    """Named members by base name; large ones are hashed on the way."""
    archive = zipped(tmp_path / "in", pkg__model_dot_gguf=BIG, pkg__other=b"no")
    out, tools = build(tmp_path, archive, {"members": ["pkg/model.gguf"]})
    assert tree(out) == {"model.gguf": BIG}
    assert tools.digests == {out / "model.gguf": hashlib.sha256(BIG).hexdigest()}


def test_a_subtree_keeps_its_shape_links_and_executable_bits(tmp_path: Path) -> None:
    """The prefix goes, also by a leading *; what lies elsewhere stays out."""
    archive = tar(
        tmp_path / "in",
        ("top-1.0/src/a.c", b"a"),
        ("top-1.0/src/sub/run.sh", b"#!/bin/sh"),
        special("top-1.0/src/sub/link", tarfile.SYMTYPE, "../a.c"),
        special("top-1.0/src/hard", tarfile.LNKTYPE, "top-1.0/src/a.c"),
        ("top-1.0/docs/x", b"x"),
    )
    out, _ = build(tmp_path, archive, {"subtree": "*/src", "members": []})
    assert tree(out) == {
        "a.c": b"a",
        "sub/run.sh": b"#!/bin/sh",
        "sub/link": b"a",
        "hard": b"a",
    }
    assert (out / "sub/link").is_symlink()
    assert (out / "sub/run.sh").stat().st_mode & 0o111
    assert not (out / "a.c").stat().st_mode & 0o111


@pytest.mark.parametrize("form", ["gz", "bz2", "xz", ""])
def test_the_format_is_seen_from_the_content(form: str, tmp_path: Path) -> None:
    """Whatever the file is called."""
    archive = tar(tmp_path / "in", ("a", b"1"), form=form)
    out, _ = build(tmp_path, archive, {"subtree": ""})
    assert tree(out) == {"a": b"1"}


def test_pinned_members_are_checked_and_known_beforehand(tmp_path: Path) -> None:
    """Size and digest of a member are as strict as those of a download."""
    archive = zipped(tmp_path / "in", a=b"hello")
    pin: dict[str, Json] = {
        "member": "a",
        "sha256": hashlib.sha256(b"hello").hexdigest(),
        "size": 5,
    }
    params: dict[str, Json] = {"members": [pin]}
    fixed = RECIPE.fixed_output(params)
    assert fixed is not None
    assert (fixed[0].path, fixed[0].size) == ("a", 5)
    assert RECIPE.fixed_output({"members": ["a"]}) is None
    assert RECIPE.fixed_output({"subtree": ""}) is None
    out, _ = build(tmp_path, archive, params)
    assert tree(out) == {"a": b"hello"}
    (out / "a").unlink()
    for wrong in ({"size": 6}, {"sha256": "0" * 64}):
        with pytest.raises(DigestMismatch):
            RECIPE.build({"members": [{**pin, **wrong}]}, {"archive": archive}, out, NoTools(out))


def test_a_missing_member_lists_what_is_there(tmp_path: Path) -> None:
    """The remedy shows the archive's names."""
    archive = zipped(tmp_path / "in", one=b"1", two=b"2")
    with pytest.raises(InvalidInput, match=r"no member three.*one, two"):
        build(tmp_path, archive, {"members": ["three"]})


def test_refuses_an_empty_subtree_and_what_is_not_an_archive(tmp_path: Path) -> None:
    """A wrong folder name, a file that is not an archive, an object of two files."""
    archive = tar(tmp_path / "in", ("a/b", b"1"))
    with pytest.raises(InvalidInput, match="nothing below 'c'"):
        build(tmp_path, archive, {"subtree": "c"})
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x").write_bytes(b"not an archive")
    with pytest.raises(InvalidInput, match="not a zip or tar"):
        RECIPE.build({"subtree": ""}, {"archive": plain}, tmp_path / "out", NoTools(tmp_path))
    (plain / "y").write_bytes(b"")
    with pytest.raises(InvalidDerivation, match="holds 2 files"):
        RECIPE.build({"subtree": ""}, {"archive": plain}, tmp_path / "out", NoTools(tmp_path))
    with pytest.raises(InvalidDerivation, match="archive is missing"):
        RECIPE.build({"subtree": ""}, {}, tmp_path / "out", NoTools(tmp_path))


HOSTILE = {
    "climbs": [("../out-of-here", b"x")],
    "climbs within": [("a/../../b", b"x")],
    "absolute": [("/etc/cron.d/x", b"x")],
    "absolute link": [special("l", tarfile.SYMTYPE, "/etc/passwd")],
    "climbing link": [special("a/l", tarfile.SYMTYPE, "../../x")],
    "through a link": [special("l", tarfile.SYMTYPE, "."), ("l/x", b"x")],
    "over a link": [special("l", tarfile.SYMTYPE, "x"), ("l", b"x")],
    "device": [special("d", tarfile.CHRTYPE)],
    "pipe": [special("p", tarfile.FIFOTYPE)],
    "twice": [("a", b"1"), ("a", b"2")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(case: str, tmp_path: Path) -> None:
    """Nothing is written outside the output, and no special file inside it."""
    archive = tar(tmp_path / "in", *HOSTILE[case])
    with pytest.raises(HostileArchive):
        build(tmp_path, archive, {"subtree": ""})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_hard_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    """A hard link copies a file of the same output, or nothing."""
    archive = tar(tmp_path / "in", special("h", tarfile.LNKTYPE, "etc/passwd"))
    with pytest.raises(InvalidInput, match="hard link"):
        build(tmp_path, archive, {"subtree": ""})


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files or bytes end the unpacking, not the disk."""
    archive = tar(tmp_path / "in", *[(f"f{i}", b"1") for i in range(20)])
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 10)
    with pytest.raises(HostileArchive, match="more than 10 files"):
        build(tmp_path, archive, {"subtree": ""})
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 1000)
    monkeypatch.setattr(unpack, "MAX_BYTES", 5)
    (tmp_path / "again").mkdir()
    with pytest.raises(HostileArchive, match="or 5 bytes"):
        build(tmp_path / "again", archive, {"subtree": ""})


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    """A tar that ends early is an error, not a smaller tree."""
    archive = tar(tmp_path / "in", ("a", BIG), form="")
    whole = (archive / "a.tar.gz").read_bytes()
    (archive / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput):
        build(tmp_path, archive, {"subtree": ""})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"members": ["a/x", "b/x"]}, "different base names"),
        ({"members": ["../x"]}, "plain relative path"),
        ({"members": [1]}, "a table"),
        ({"members": ["a"], "subtree": "b"}, "either members or subtree"),
        ({"subtree": "../up"}, "plain relative path"),
        ({"strip": 1}, "unknown fields: strip"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Refused before anything is unpacked."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)
