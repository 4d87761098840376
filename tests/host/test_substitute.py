"""Depots over HTTP: a real server, real sockets, and the ways in which transfers go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import (
    Gated,
    InvalidInput,
    RateLimited,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.core.store.claims import SigningKey, Trust
from mmadmin.core.store.depot import Folder, bytes_path
from mmadmin.core.store.push import push
from mmadmin.core.store.substitute import Substituter
from mmadmin.host.substitute import HttpDepot, depot_at, open_substituter, serve
from tests.core.store.test_substitute import goal
from tests.core.workshop import Shop, Watch, add, damage, tools_for
from tests.support.depots import Refusing, running, static

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


def quick(url: str) -> HttpDepot:
    """A depot that does not pause between attempts."""
    return HttpDepot(url, pause_s=0)


def test_a_served_store_is_a_depot(store: Store, other: Store) -> None:
    """Claims are signed as they are asked for; the other store builds nothing."""
    shop = Shop()
    done = realise(goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    with running(serve(store.root, ("127.0.0.1", 0), signer=ALICE)) as url:
        depot = quick(url)
        substituter = Substituter(other, [depot], TRUST)
        fresh = Shop()
        realise(
            goal(), other, tools_for, Watch(), recipe_of=fresh.recipe_of, substituter=substituter
        )
        depot.close()
    assert fresh.ran == []
    assert other.closure(done.object) == store.closure(done.object)
    assert damage(other) == []


def test_a_pushed_folder_behind_a_plain_web_server_is_a_depot(
    store: Store, other: Store, tmp_path: Path
) -> None:
    """Nothing but static files is needed; a server without Range costs only a new start."""
    found = add(store, "x", {"big": CONTENT, "run*": b"#!"})
    push(store, [found.name], Folder(tmp_path / "depot"))
    with running(static(tmp_path / "depot", ranges=False)) as url:
        depot = quick(url)
        (other.layout.downloads / f"{found.files[0].sha256}.part").write_bytes(b"wrong beginning")
        with other.lease("t") as lease:
            assert Substituter(other, [depot], TRUST).pull(found.name, lease)
        depot.close()
    assert damage(other) == []


@pytest.fixture
def depot_folder(tmp_path: Path, store: Store) -> tuple[Path, str, str]:
    """A pushed folder, the path of its large file, and the file's sha256."""
    found = add(store, "x", {"big": CONTENT})
    push(store, [found.name], Folder(tmp_path / "depot"))
    return tmp_path / "depot", bytes_path(found.files[0].sha256), found.files[0].sha256


def test_a_transfer_that_breaks_goes_on_where_it_stopped(
    depot_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Connections that end early lose nothing: the rest is asked for."""
    root, path, sha256 = depot_folder
    server = static(root, ranges=True, cut=lambda n: 1_000_000 * n if n < 3 else None)
    with running(server) as url:
        depot = quick(url)
        assert depot.fetch(path, tmp_path / "part", len(CONTENT), silent) == sha256
        depot.close()
    assert server.asked == ["", "bytes=1000000-", "bytes=3000000-"]  # type: ignore[attr-defined]
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_part_of_an_earlier_process_is_gone_on_with(
    depot_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Whatever was transferred before a kill is not transferred again, at any byte."""
    root, path, sha256 = depot_folder
    for have in (1, 65_537, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 5):
        (tmp_path / "part").write_bytes(CONTENT[:have].ljust(have, b"x"))
        server = static(root, ranges=True)
        with running(server) as url:
            depot = quick(url)
            assert depot.fetch(path, tmp_path / "part", len(CONTENT), silent) == sha256
            depot.close()
        assert server.asked == [f"bytes={have}-" if have < len(CONTENT) else ""]  # type: ignore[attr-defined]


def test_a_server_that_always_breaks_is_given_up_and_the_part_kept(
    depot_folder: tuple[Path, str, str], tmp_path: Path
) -> None:
    """After a few attempts it is unavailable, in words; the bytes so far stay."""
    root, path, _ = depot_folder
    with running(static(root, ranges=True, cut=lambda _: 1000)) as url:
        depot = quick(url)
        with pytest.raises(SourceUnavailable, match="does not answer"):
            depot.fetch(path, tmp_path / "part", len(CONTENT), silent)
        depot.close()
    assert (tmp_path / "part").stat().st_size == 5000
    with pytest.raises(SourceUnavailable):
        quick("http://127.0.0.1:9").read("x")


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (401, {}, Unauthorized),
        (403, {}, Gated),
        (418, {}, SourceUnavailable),
        (429, {"Retry-After": "900"}, RateLimited),
        (500, {}, SourceUnavailable),
    ],
)
def test_refusals_are_told_apart(
    tmp_path: Path, status: int, headers: dict[str, str], error: type[Exception]
) -> None:
    """Each status has its own meaning; only a 404 is a miss."""
    with running(static(tmp_path, ranges=True, refusing=Refusing(status, headers))) as url:
        depot = quick(url)
        with pytest.raises(error):
            depot.read("x")
        with pytest.raises(error):
            depot.fetch("x", tmp_path / "part", 10, silent)
        depot.close()
    with running(static(tmp_path, ranges=True)) as url:
        depot = quick(url)
        assert depot.read("x") is None
        assert depot.fetch("x", tmp_path / "part", 10, silent) is None
        depot.close()


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
    """Anything else is refused in words."""
    assert isinstance(depot_at(str(tmp_path)), Folder)
    assert isinstance(depot_at(f"file://{tmp_path}"), Folder)
    for peculiar in ("a+b", "a b", "a%20b", "a#b?c=d"):
        found = depot_at(str(tmp_path / peculiar))
        assert isinstance(found, Folder)
        assert found.root == tmp_path / peculiar
    spaced = depot_at(f"file://{tmp_path}/a%20b")
    assert isinstance(spaced, Folder)
    assert spaced.root == tmp_path / "a b"
    depot = depot_at("https://depot.example/x/")
    assert isinstance(depot, HttpDepot)
    assert depot.label == "https://depot.example/x"
    depot.close()
    with pytest.raises(InvalidInput):
        depot_at("ftp://x")


def test_what_builds_ask_is_configured_in_the_home(
    store: Store, other: Store, tmp_path: Path
) -> None:
    """Without the file nobody is asked; with it, its depots, under its trust."""
    home = Home(tmp_path / "home")
    home.root.mkdir()
    with open_substituter(home, other) as nobody:
        assert nobody is None
    done = realise(goal(), store, tools_for, Watch(), recipe_of=Shop().recipe_of)
    push(store, [done.object], Folder(tmp_path / "depot"), signer=ALICE)
    config = {
        "depots": ["http://127.0.0.1:9", str(tmp_path / "depot")],
        "trusted": [ALICE.public_text()],
    }
    (home.root / "substituters.json").write_text(json.dumps(config))
    shop, said = Shop(), []
    with open_substituter(home, other, report=said.append) as substituter:
        assert substituter
        for depot in substituter.depots:
            if isinstance(depot, HttpDepot):
                depot._pause_s = 0
        realise(
            goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter
        )
    assert shop.ran == []
    assert len([line for line in said if "does not answer" in line]) == 1, "asked once, not again"
