"""merge: by the real llama-gguf-split, with every check that it lacks."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from gguf import GGUFReader

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.recipes.merge import RECIPE
from mmadmin.core.errors import DiskFull, InvalidDerivation, InvalidModel, StepFailed
from mmadmin.core.formats.gguf.header import read_header, tensor_digests
from mmadmin.core.formats.gguf.shards import read_set
from mmadmin.core.store import Store
from tests.support.disks import needs_root, small_disk
from tests.support.engine import EngineStore, toolbox_for
from tests.support.models import LFS_POINTER, cut, make_shards
from tests.support.tools import Attempt, attempt

FIRST = "m-00001-of-00003.gguf"
PARAMS: dict[str, Json] = {"first": FIRST, "output": "m.gguf"}
PATIENCE_S = 120
SLEEP = f"600.{os.getpid()}"
"""How long the slow tool sleeps: odd, so that it is known from outside, and this run's alone."""


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"first": "m.gguf", "output": "x.gguf"}, "a shard's name"),
        ({"first": "m-00009-of-00003.gguf", "output": "x.gguf"}, "cannot be"),
        ({"first": FIRST, "output": "x-00001-of-00001.gguf"}, "without a shard suffix"),
        ({"first": FIRST, "output": "x.bin"}, "a .gguf name"),
        ({"first": FIRST}, "lacks output"),
        ({"first": f"../{FIRST}", "output": "x.gguf"}, "plain relative path"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """A merged file never looks like a shard."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)


def refused(work: Attempt, error: type[Exception], words: str, **inputs: Path) -> None:
    """The merge is refused in these words and leaves nothing in the output."""
    with pytest.raises(error, match=words):
        work.build(RECIPE, PARAMS, **inputs)
    assert not list(work.out.iterdir())


# --- bad shard sets, against the real tool ------------------------------------------------------


def cut_header_whole(paths: list[Path], folder: Path) -> None:
    """140 bytes off shard 3."""
    cut(paths[2], 140)


def cut_to_400(paths: list[Path], folder: Path) -> None:
    """Shard 2 cut to 400 bytes."""
    paths[1].write_bytes(paths[1].read_bytes()[:400])


def foreign(paths: list[Path], folder: Path) -> None:
    """Shard 3 of another build."""
    shutil.copyfile(make_shards(folder / "other", tensors=5, seed=2)[2], paths[2])


def pointer(paths: list[Path], folder: Path) -> None:
    """Shard 2 is an LFS pointer."""
    paths[1].write_text(LFS_POINTER)


def web_page(paths: list[Path], folder: Path) -> None:
    """Shard 3 is an error page."""
    paths[2].write_text("<!DOCTYPE html><html>404</html>")


def missing(paths: list[Path], folder: Path) -> None:
    """Shard 2 is not there."""
    paths[1].unlink()


def swapped(paths: list[Path], folder: Path) -> None:
    """Shards 2 and 3 have each other's name."""
    paths[1].rename(folder / "hold")
    paths[2].rename(paths[1])
    (folder / "hold").rename(paths[2])


def duplicated(paths: list[Path], folder: Path) -> None:
    """Shard 3 is a copy of shard 2."""
    shutil.copyfile(paths[1], paths[2])


BAD: list[tuple[Callable[[list[Path], Path], None], int, str]] = [
    (cut_header_whole, 3, "cut short"),
    (cut_to_400, 2, ""),
    (foreign, 3, "belongs to a model of 5 tensors"),
    (pointer, 2, "Git-LFS pointer"),
    (web_page, 3, "web page"),
    (missing, 2, "missing"),
    (swapped, 2, "it is shard 3"),
    (duplicated, 3, "it is shard 2"),
]


@pytest.mark.engine
@pytest.mark.parametrize(("spoil", "number", "words"), BAD, ids=[case[0].__name__ for case in BAD])
def test_bad_sets_are_refused_with_the_shard_named(
    spoil: Callable[[list[Path], Path], None],
    number: int,
    words: str,
    tmp_path: Path,
    engine_store: EngineStore,
) -> None:
    """Each bad set, the real tool at hand: refused before it runs, the right shard in the words."""
    paths = make_shards(tmp_path / "shards")
    spoil(paths, tmp_path)
    work = attempt(tmp_path / "work")
    refused(
        work,
        InvalidModel,
        rf"m-0000{number}-of-00003\.gguf.*{words}",
        shards=tmp_path / "shards",
        engine=engine_store.path("tools"),
    )
    assert not any("gguf_merge" in line for line in work.lines)


@pytest.mark.engine
def test_the_real_tool_takes_what_we_refuse(tmp_path: Path, engine_store: EngineStore) -> None:
    """Why the checks exist: the tool itself merges a truncated shard with exit code 0."""
    paths = make_shards(tmp_path / "shards")
    tool = engine_store.path("tools") / "bin/llama-gguf-split"
    whole, spoilt = tmp_path / "whole.gguf", tmp_path / "spoilt.gguf"
    subprocess.run([tool, "--merge", paths[0], whole], check=True, capture_output=True)
    cut(paths[2], 140)
    subprocess.run([tool, "--merge", paths[0], spoilt], check=True, capture_output=True)
    assert whole.stat().st_size == spoilt.stat().st_size
    good, bad = (tensor_digests(path, read_header(path)) for path in (whole, spoilt))
    assert [name for name in good if good[name] != bad[name]] == ["blk.5.weight"]


@pytest.mark.engine
def test_a_good_set_merges_and_is_proven(tmp_path: Path, engine_store: EngineStore) -> None:
    """Metadata, arrays and tensors as the shards have them; digest known; twice the same bytes."""
    make_shards(tmp_path / "shards")
    inputs = {"shards": tmp_path / "shards", "engine": engine_store.path("tools")}
    one, two = attempt(tmp_path / "one"), attempt(tmp_path / "two")
    merged = one.build(RECIPE, PARAMS, **inputs) / "m.gguf"
    digest = hashlib.sha256(merged.read_bytes()).hexdigest()
    assert one.tools.known == {"m.gguf": digest}
    assert (two.build(RECIPE, PARAMS, **inputs) / "m.gguf").read_bytes() == merged.read_bytes()
    assert list(one.out.iterdir()) == [merged]
    reader = GGUFReader(merged)
    assert len(reader.tensors) == 6
    assert len(reader.fields["tokenizer.ggml.merges"].data) == 3
    assert one.staging.reserved > merged.stat().st_size


@pytest.mark.engine
def test_the_real_models_split_like_the_seeds_repository_merges(
    tmp_path: Path, engine_store: EngineStore
) -> None:
    """Small first shard with the metadata alone, as the big repositories have it."""
    folder = tmp_path / "shards"
    folder.mkdir()
    tool = engine_store.path("tools") / "bin/llama-gguf-split"
    subprocess.run(
        [
            *(tool, "--split", "--split-max-tensors", "100", "--no-tensor-first-split"),
            *(engine_store.model, folder / "smol"),
        ],
        check=True,
        capture_output=True,
    )
    shards = read_set(folder / "smol-00001-of-00004.gguf")
    assert len(shards[0].header.tensors) == 0
    params: dict[str, Json] = {"first": "smol-00001-of-00004.gguf", "output": "smol.gguf"}
    out = attempt(tmp_path / "work").build(
        RECIPE, params, shards=folder, engine=engine_store.path("tools")
    )
    original, merged = read_header(engine_store.model), read_header(out / "smol.gguf")
    assert {t.name for t in merged.tensors} == {t.name for t in original.tensors}
    assert tensor_digests(out / "smol.gguf", merged) == tensor_digests(engine_store.model, original)


@pytest.mark.engine
def test_another_alignment_is_proven_or_refused(tmp_path: Path, engine_store: EngineStore) -> None:
    """The tool pads by 32 whatever the model says: right by luck, and then hashed afterwards."""
    outcomes = []
    for length in (1, 33):
        folder = tmp_path / str(length)
        make_shards(folder / "s", alignment=64, width=64, extra={"x.pad": "p" * length})
        work = attempt(folder / "work")
        inputs = {"shards": folder / "s", "engine": engine_store.path("tools")}
        try:
            merged = work.build(RECIPE, PARAMS, **inputs) / "m.gguf"
        except InvalidModel:
            outcomes.append("refused")
        else:
            digest = hashlib.sha256(merged.read_bytes()).hexdigest()
            assert work.tools.known == {"m.gguf": digest}
            outcomes.append("proven")
    assert sorted(outcomes) == ["proven", "refused"]


# --- a tool that lies --------------------------------------------------------------------------


def lying_engine(folder: Path, real: Path, after: str) -> Path:
    """An engine object whose merge tool runs the real one and then `after` on the output $3."""
    tool = folder / "bin/llama-gguf-split"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\n{real}/bin/llama-gguf-split "$@" || exit $?\n{after}\n')
    tool.chmod(0o755)
    return folder


FLIP_LAST = (
    'printf "\\377" | dd of="$3" bs=1 seek=$(($(stat -c %s "$3") - 20)) conv=notrunc 2>/dev/null'
)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("after", "words"),
    [
        (FLIP_LAST, "tensor blk.5.weight differs from m-00003-of-00003.gguf"),
        ('truncate -s -64 "$3"', "cut short"),
        ('sed -i "s/b c/b x/" "$3"', "tokenizer.ggml.merges differs"),
        (
            'sed -i "s/tokenizer.ggml.model/tokenizer.ggml.modem/" "$3"',
            "it lacks tokenizer.ggml.model",
        ),
        (
            'sed -i "s/blk.1.weight/blk.9.weight/" "$3"',
            "it lacks 1 tensors, among them blk.1.weight",
        ),
        (': > "$3"', "empty"),
    ],
)
def test_a_merge_that_went_wrong_is_caught(
    after: str, words: str, tmp_path: Path, engine_store: EngineStore
) -> None:
    """A lost array, a changed byte, a renamed tensor, a short file: exit code 0 is no proof."""
    make_shards(tmp_path / "shards")
    engine = lying_engine(tmp_path / "engine", engine_store.path("tools"), after)
    refused(
        attempt(tmp_path / "work"), InvalidModel, words, shards=tmp_path / "shards", engine=engine
    )


@pytest.mark.engine
def test_a_tool_that_fails_is_quoted_with_a_warning(
    tmp_path: Path, engine_store: EngineStore
) -> None:
    """Its own words, and that the file which it names may not be the one."""
    make_shards(tmp_path / "shards")
    engine = lying_engine(tmp_path / "engine", engine_store.path("tools"), "echo boom; exit 134")
    refused(
        attempt(tmp_path / "work"),
        StepFailed,
        r"signal 6: boom.*name the first shard",
        shards=tmp_path / "shards",
        engine=engine,
    )


def test_an_engine_without_the_tool_is_said(tmp_path: Path) -> None:
    """The remedy names the target to build."""
    make_shards(tmp_path / "shards")
    (tmp_path / "engine").mkdir()
    work = attempt(tmp_path / "work")
    refused(
        work,
        InvalidDerivation,
        "target llama-gguf-split",
        shards=tmp_path / "shards",
        engine=tmp_path / "engine",
    )


@needs_root
@pytest.mark.engine
def test_a_full_disk_is_clean_and_a_retry_works(tmp_path: Path, engine_store: EngineStore) -> None:
    """The tool dies with SIGABRT on ENOSPC: we say disk full, the shards stay, a retry is whole."""
    shards = make_shards(tmp_path / "shards", width=20_000)
    before = [path.read_bytes() for path in shards]
    inputs = {"shards": tmp_path / "shards", "engine": engine_store.path("tools")}
    with small_disk(tmp_path / "small", "1500k") as small:
        refused(attempt(small / "work"), DiskFull, "disk full while llama-gguf-split", **inputs)
    assert [path.read_bytes() for path in shards] == before
    assert (attempt(tmp_path / "work").build(RECIPE, PARAMS, **inputs) / "m.gguf").is_file()


# --- killed in the middle ----------------------------------------------------------------------

MERGE_CHILD = """
import sys
from pathlib import Path
from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.store import Store
from tests.core.engines.llama_server.recipes.test_merge import merge_graph
from tests.support.engine import toolbox_for
store = Store(Path(sys.argv[1]))
merge = merge_graph(Path(sys.argv[2]), Path(sys.argv[3]))[-1]
realise(merge, store, toolbox_for(store), UNOBSERVED)
"""


def fetch_folder(name: str, folder: Path) -> Derivation:
    """A fetch of every file of a local folder."""
    files: list[Json] = [
        {
            "path": path.relative_to(folder).as_posix(),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
            "executable": os.access(path, os.X_OK),
            "source": {"kind": "path", "path": str(path)},
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return Derivation(name, "fetch", 1, {"files": files}, {})


def merge_graph(shards: Path, engine: Path) -> list[Derivation]:
    """Shards, engine, merge: in order."""
    inputs = {"shards": fetch_folder("shards", shards), "engine": fetch_folder("engine", engine)}
    return [*inputs.values(), Derivation("m", "merge", 1, PARAMS, inputs)]


@pytest.mark.engine
def test_kill_9_in_the_middle_of_a_merge(tmp_path: Path, engine_store: EngineStore) -> None:
    """The half-written merge is never an object, its tool dies, the next build is whole."""
    shards, engine, flag = tmp_path / "shards", tmp_path / "engine", tmp_path / "slow"
    make_shards(shards, width=20_000)
    real = engine_store.path("tools")
    lying_engine(engine, real, f'if [ -e {flag} ]; then truncate -s 1000 "$3"; sleep {SLEEP}; fi')
    flag.touch()
    root = tmp_path / "store"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MERGE_CHILD), root, shards, engine],
        cwd=Path(__file__).resolve().parents[5],
    )
    try:
        wait_for(sleeping)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    wait_for(lambda: not sleeping())
    flag.unlink()
    store = Store(root)
    merge = merge_graph(shards, engine)[-1]
    names = [found.name for found in store.objects()]
    assert not [name for name in names if name.endswith("-m")]
    record = realise(merge, store, toolbox_for(store), UNOBSERVED)
    assert len([found for found in store.objects() if found.name.endswith("-m")]) == 1
    merged = store.object_path(record.object) / "m.gguf"
    assert len(read_header(merged).tensors) == 6

    def swept() -> bool:
        store.sweep()  # leaves alone what is younger than a moment
        return not list((root / "staging").iterdir())

    wait_for(swept)


def sleeping() -> bool:
    """True while the slow tool sleeps."""
    return any(p.info["cmdline"] == ["sleep", SLEEP] for p in psutil.process_iter(["cmdline"]))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for something to come true, or fail."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
