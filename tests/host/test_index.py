"""Package files through the indexes that pip is configured with; a local index over real HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmadmin.core.errors import SourceMissing, SourceUnavailable
from mmadmin.host import index
from mmadmin.host.index import PipConfig, pip_config, without_login
from tests.support.hub import LocalHub, local_hub
from tests.support.tools import attempt

SDIST, WHEEL = b"sdist" * 300, b"wheel" * 300


@pytest.fixture
def server() -> Iterator[LocalHub]:
    """An index with one project: an sdist, two platform wheels."""
    with local_hub() as running:
        files = {
            "demo_engine-1.2.0.tar.gz": SDIST,
            "demo_engine-1.2.0-cp311-cp311-win_amd64.whl": b"win",
            "demo_engine-1.2.0-py3-none-any.whl": WHEEL,
            "demo_engine-1.3.0.tar.gz": b"newer",
        }
        links = ""
        for name, data in files.items():
            running.plain[f"files/{name}"] = data
            sha = hashlib.sha256(data).hexdigest()
            links += f'<a href="{running.url}/files/{name}#sha256={sha}">{name}</a>\n'
        running.pages["simple/demo-engine"] = f"<!DOCTYPE html><html><body>{links}</body></html>"
        yield running


def config(server: LocalHub) -> PipConfig:
    """Pip configured with the local index only."""
    return PipConfig(index_urls=(f"{server.url}/simple/",))


def test_the_release_file_is_found_by_kind_and_by_name(server: LocalHub) -> None:
    """Exactly that version, sdist or wheel or a named file, whatever this platform is."""
    sdist = index.find("demo-engine", "1.2.0", kind="sdist", config=config(server))
    assert sdist.filename == "demo_engine-1.2.0.tar.gz"
    assert sdist.sha256 == hashlib.sha256(SDIST).hexdigest()
    named = "demo_engine-1.2.0-cp311-cp311-win_amd64.whl"
    found = index.find("demo-engine", "1.2.0", filename=named, config=config(server))
    assert found.filename == named
    assert index.find(
        "Demo_Engine", "1.2.0", kind="wheel", config=config(server)
    ).filename.endswith(".whl")


def test_what_is_not_there_lists_what_is(server: LocalHub) -> None:
    """An unknown version, kind or project is `SourceMissing`, with the files that there are."""
    with pytest.raises(SourceMissing, match=r"there are: demo_engine-1\.3\.0\.tar\.gz"):
        index.find("demo-engine", "1.3.0", kind="wheel", config=config(server))
    with pytest.raises(SourceMissing, match="check project and version"):
        index.find("demo-engine", "9.9", config=config(server))
    with pytest.raises(SourceMissing):
        index.find("other", "1", config=config(server))


def test_a_dead_index_is_unavailable_not_missing() -> None:
    """No answer is not the same as "no such file"."""
    dead = PipConfig(index_urls=("http://127.0.0.1:9/simple/",))
    with pytest.raises(SourceUnavailable, match="pip config list"):
        index.find("demo-engine", "1.2.0", config=dead)


def test_an_index_file_is_fetched_by_its_digest(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetch finds the file's address anew and trusts only the pin."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    from mmadmin.core.recipes.fetch import RECIPE

    source = {
        "kind": "index",
        "project": "demo-engine",
        "version": "1.2.0",
        "filename": "demo_engine-1.2.0.tar.gz",
    }
    pin = {"sha256": hashlib.sha256(SDIST).hexdigest(), "size": len(SDIST)}
    work = attempt(tmp_path)
    out = work.build(RECIPE, {"files": [{"path": "src.tar.gz", **pin, "source": source}]})
    assert (out / "src.tar.gz").read_bytes() == SDIST
    assert work.tools.known == {"src.tar.gz": pin["sha256"]}


def test_pip_configuration_files_and_variables_are_read(tmp_path: Path) -> None:
    """User file over site file, variables over files, `[download]` over `[global]`."""
    (tmp_path / "etc/pip").mkdir(parents=True)
    (tmp_path / "home/.config/pip").mkdir(parents=True)
    (tmp_path / "etc/pip/pip.conf").write_text(
        "[global]\nindex-url = https://site.invalid/simple\ncert = /site.pem\n"
    )
    (tmp_path / "home/.config/pip/pip.conf").write_text(
        "[global]\nextra-index-url =\n  https://a.invalid/simple\n  https://b.invalid/simple\n"
        "[download]\ntrusted-host = a.invalid\n"
    )
    env = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}
    none = tmp_path / "none"
    read = pip_config(env, system=none)
    assert read.index_urls == (
        "https://site.invalid/simple",
        "https://a.invalid/simple",
        "https://b.invalid/simple",
    )
    assert read.cert == "/site.pem"
    assert read.trusted_hosts == ("a.invalid",)
    env |= {"PIP_INDEX_URL": "https://env.invalid/simple", "PIP_FIND_LINKS": "/wheels"}
    assert pip_config(env, system=none).index_urls[0] == "https://env.invalid/simple"
    assert pip_config(env, system=none).find_links == ("/wheels",)
    assert pip_config({**env, "PIP_NO_INDEX": "1"}, system=none).index_urls == ()


def test_a_login_in_an_address_becomes_a_header() -> None:
    """Names and passwords leave the address, so that no message can show them."""
    url, headers = without_login("https://me:canary@mirror.invalid/simple/x.whl")
    assert url == "https://mirror.invalid/simple/x.whl"
    assert headers == {"Authorization": "Basic bWU6Y2FuYXJ5"}
    assert without_login("https://mirror.invalid/x") == ("https://mirror.invalid/x", {})
