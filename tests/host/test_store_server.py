"""Binary caches over HTTP: a real server, real sockets, and the ways in which transfers go wrong."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import (
    Gated,
    InvalidInput,
    MmError,
    RateLimited,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.core.store.attestations import SigningKey, Trust
from mmadmin.core.store.binary_cache import FolderCache, bytes_path
from mmadmin.core.store.push import push
from mmadmin.core.store.substitute import Substituter
from mmadmin.host import binary_caches
from mmadmin.host.binary_caches import (
    READ_BYTES,
    RemoteCache,
    cache_at,
    configured_substituter,
    web_cache,
)
from mmadmin.host.store_server import serve
from tests.core.store.test_substitute import goal
from tests.core.workshop import Shop, Watch, add, damage, tools_for
from tests.support.caches import CANARY, Refusing, running, static

ALICE = SigningKey.generate("alice")
TRUST = Trust.of([ALICE.public_text()])
CONTENT = bytes(range(256)) * 20_000  # 5 MB


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that is served."""
    return Store(tmp_path / "one", floor_bytes=0)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """The store that pulls."""
    return Store(tmp_path / "two", floor_bytes=0)


def quick(url: str) -> RemoteCache:
    """A cache that does not pause between attempts."""
    return web_cache(url, pause_s=0.001)


def test_a_served_store_is_a_cache(store: Store, other: Store) -> None:
    """Claims are signed as they are asked for; the other store builds nothing."""
    shop = Shop()
    done = realise(goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    with running(serve(store.root, ("127.0.0.1", 0), signer=ALICE)) as url:
        cache = quick(url)
        substituter = Substituter(other, [cache], TRUST)
        fresh = Shop()
        realise(
            goal(), other, tools_for, Watch(), recipe_of=fresh.recipe_of, substituter=substituter
        )
    assert fresh.ran == []
    assert other.closure(done.object) == store.closure(done.object)
    assert damage(other) == []


def test_a_pushed_folder_behind_a_plain_web_server_is_a_cache(
    store: Store, other: Store, tmp_path: Path
) -> None:
    """Nothing but static files is needed; a server without Range costs only a new start."""
    found = add(store, "x", {"big": CONTENT, "run*": b"#!"})
    push(store, [found.name], FolderCache(tmp_path / "cache"))
    with running(static(tmp_path / "cache", ranges=False)) as url:
        cache = quick(url)
        (other.layout.downloads / f"{found.files[0].sha256}.part").write_bytes(b"wrong beginning")
        with other.lease("t") as lease:
            assert Substituter(other, [cache], TRUST).pull(found.name, lease)
    assert damage(other) == []


@pytest.fixture
def cache_folder(tmp_path: Path, store: Store) -> tuple[Path, str, str]:
    """A pushed folder, the path of its large file, and the file's sha256."""
    found = add(store, "x", {"big": CONTENT})
    push(store, [found.name], FolderCache(tmp_path / "cache"))
    return tmp_path / "cache", bytes_path(found.files[0].sha256), found.files[0].sha256


def test_a_transfer_that_breaks_goes_on_where_it_stopped(
    cache_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Connections that end early lose nothing: the rest is asked for."""
    root, path, sha256 = cache_folder
    server = static(root, ranges=True, cut=lambda n: 1_500_000 if n < 4 else None)
    with running(server) as url:
        assert quick(url).fetch(path, tmp_path / "part", len(CONTENT), silent) == sha256
    asked = [int(one[6:].partition("-")[0] or 0) for one in server.asked]  # type: ignore[attr-defined]
    for before, after in itertools.pairwise(asked):
        assert 1_500_000 - READ_BYTES < after - before <= 1_500_000
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_part_of_an_earlier_process_is_gone_on_with(
    cache_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Whatever was transferred before a kill is not transferred again, at any byte."""
    root, path, sha256 = cache_folder
    for have in (1, 65_537, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 5):
        (tmp_path / "part").write_bytes(CONTENT[:have].ljust(have, b"x"))
        server = static(root, ranges=True)
        with running(server) as url:
            cache = quick(url)
            assert cache.fetch(path, tmp_path / "part", len(CONTENT), silent) == sha256
        assert server.asked == [f"bytes={have}-" if have < len(CONTENT) else ""]  # type: ignore[attr-defined]


def test_a_server_that_always_breaks_is_given_up_and_the_part_kept(
    cache_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """After a few attempts it is unavailable; the bytes so far stay."""
    root, path, _ = cache_folder
    with running(static(root, ranges=True, cut=lambda n: 1_000_000 if n == 1 else 0)) as url:
        with pytest.raises(SourceUnavailable, match=r"5 times") as refused:
            quick(url).fetch(path, tmp_path / "part", len(CONTENT), silent)
        assert "kept" in refused.value.remedy
    assert 1_000_000 - READ_BYTES < (tmp_path / "part").stat().st_size <= 1_000_000
    with pytest.raises(SourceUnavailable, match="connection refused"):
        quick("http://127.0.0.1:9").read("x")


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (401, {}, Unauthorized),
        (403, {}, Gated),
        (418, {}, SourceUnavailable),
        (429, {}, RateLimited),
        (500, {}, SourceUnavailable),
    ],
)
def test_refusals_are_told_apart(
    tmp_path: Path, status: int, headers: dict[str, str], error: type[Exception]
) -> None:
    """Each status has its own meaning; only a 404 is a miss."""
    with running(static(tmp_path, ranges=True, refusing=Refusing(status, headers))) as url:
        cache = quick(url)
        with pytest.raises(error):
            cache.read("x")
        with pytest.raises(error):
            cache.fetch("x", tmp_path / "part", 10, silent)
    with running(static(tmp_path, ranges=True)) as url:
        cache = quick(url)
        assert cache.read("x") is None
        assert cache.fetch("x", tmp_path / "part", 10, silent) is None


def test_only_the_layout_is_served(store: Store) -> None:
    """No other file of the machine, no claims without a signer, ranges as the standard says."""
    found = add(store, "x", {"big": CONTENT})
    blob = bytes_path(found.files[0].sha256)
    (store.root / "secret").write_text("secret")
    with running(serve(store.root, ("127.0.0.1", 0))) as url, httpx2.Client(base_url=url) as client:
        for path in (
            "/",
            "/secret",
            "/index.sqlite3",
            "/blobs/sha256/../../secret",
            "/blobs/sha256/%2e%2e/%2e%2e/secret",
            f"/realisations/{'0' * 64}.json",
            "/objects/x.json",
            f"/blobs/sha256/00/{found.files[0].sha256}",
        ):
            assert client.get(path).status_code == 404, path
        assert client.get(f"/{blob}").content == CONTENT
        assert client.head(f"/{blob}").headers["Content-Length"] == str(len(CONTENT))
        some = client.get(f"/{blob}", headers={"Range": "bytes=10-19"})
        assert (some.status_code, some.content, some.headers["Content-Range"]) == (
            206,
            CONTENT[10:20],
            f"bytes 10-19/{len(CONTENT)}",
        )
        rest = client.get(f"/{blob}", headers={"Range": f"bytes={len(CONTENT) - 3}-"})
        assert rest.content == CONTENT[-3:]
        assert (
            client.get(f"/{blob}", headers={"Range": f"bytes={len(CONTENT)}-"}).status_code == 416
        )
        assert client.get(f"/objects/{found.name}.json").json()["name"] == found.name
        assert client.post(f"/{blob}").status_code == 501


def test_addresses_are_folders_or_http(tmp_path: Path) -> None:
    """Anything else is refused with a message."""
    assert isinstance(cache_at(str(tmp_path)), FolderCache)
    assert isinstance(cache_at(f"file://{tmp_path}"), FolderCache)
    for peculiar in ("a+b", "a b", "a%20b", "a#b?c=d"):
        found = cache_at(str(tmp_path / peculiar))
        assert isinstance(found, FolderCache)
        assert found.root == tmp_path / peculiar
    spaced = cache_at(f"file://{tmp_path}/a%20b")
    assert isinstance(spaced, FolderCache)
    assert spaced.root == tmp_path / "a b"
    cache = cache_at(f"https://name:{CANARY}@cache.example/x/")
    assert isinstance(cache, RemoteCache)
    assert cache.label == "https://cache.example/x"
    with pytest.raises(InvalidInput):
        cache_at("ftp://x")


@pytest.mark.parametrize("key", ["caches", "depots"])
def test_what_builds_ask_is_configured_in_the_home(
    store: Store, other: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Without the file nobody is asked; with it, its caches, also under their earlier name."""
    home = Home(tmp_path / "home")
    home.root.mkdir()
    assert configured_substituter(home, other) is None
    done = realise(goal(), store, tools_for, Watch(), recipe_of=Shop().recipe_of)
    push(store, [done.object], FolderCache(tmp_path / "cache"), signer=ALICE)
    config = {
        key: ["http://127.0.0.1:9", str(tmp_path / "cache")],
        "trusted": [ALICE.public_text()],
    }
    (home.root / "substituters.json").write_text(json.dumps(config))
    monkeypatch.setattr(binary_caches, "RETRIES", 0)
    shop, said = Shop(), []
    substituter = configured_substituter(home, other, report=said.append)
    assert substituter
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    assert len([line for line in said if "does not answer" in line]) == 1, "asked once, not again"


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_login_of_an_address_is_sent_and_never_shown(tmp_path: Path, status: int) -> None:
    """It reaches the server as a header; labels and errors do not have it."""
    seen: list[str] = []
    with running(static(tmp_path, ranges=True, refusing=Refusing(status, {}), seen=seen)) as url:
        cache = quick(url.replace("//", f"//name:{CANARY}@"))
        with pytest.raises(MmError) as refused:
            cache.read("x")
    assert seen[0] == "Basic " + base64.b64encode(f"name:{CANARY}".encode()).decode()
    assert CANARY not in str(refused.value) + refused.value.remedy + cache.label


def test_a_redirect_is_followed_without_the_login(tmp_path: Path) -> None:
    """The other host gets the request, and no header of the first."""
    (tmp_path / "x").write_bytes(b"content")
    seen: list[str] = []
    with running(static(tmp_path, ranges=True, seen=seen)) as url:
        elsewhere = {"Location": f"{url.replace('127.0.0.1', 'localhost')}/x"}
        with running(static(tmp_path, ranges=True, refusing=Refusing(302, elsewhere))) as first:
            cache = quick(first.replace("//", f"//name:{CANARY}@"))
            assert cache.read("x") == b"content"
    assert seen == [""]


def test_certificates_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is asked, with the variable that says where they should be."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(InvalidInput, match="SSL_CERT_FILE"):
        cache_at("https://cache.example")
