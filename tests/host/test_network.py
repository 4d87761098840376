"""Tokens, proxies and offline modes of the environment, and why nobody answers."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mmadmin.core.errors import InvalidInput, SourceUnavailable
from mmadmin.host.bucket import bucket_at
from mmadmin.host.doctor import Patient
from mmadmin.host.doctor import hub as hub_check
from mmadmin.host.download import Remote, download
from mmadmin.host.hub import ASKED_BY_A_PERSON, Hub
from mmadmin.host.hub_browser import browse
from mmadmin.host.index import PipConfig, find
from mmadmin.host.network import check_proxies, credential, why_silent
from mmadmin.host.policy import Policy
from tests.support.hub import LocalHub, local_hub, status
from tests.support.ports import free_port

CANARY = "hf_canary_77"
BAD = [f'"{CANARY}"', f"'{CANARY}'", f"{CANARY}\nx", f"{CANARY} x", f"{CANARY}é", f"{CANARY}\x00"]
"""Values that no trimming makes a token."""


@pytest.fixture
def local() -> Iterator[LocalHub]:
    """A hub with one repository."""
    with local_hub() as hub:
        hub.repo("o/r").commit({"F.gguf": b"g" * 4096, "README.md": b"read me"})
        yield hub


@pytest.mark.parametrize("around", ["{}\n", "{}\r\n", "\n{}", "  {}  ", "\t{}"])
def test_blanks_and_line_ends_around_a_token_are_dropped(local: LocalHub, around: str) -> None:
    """As the token's file is read: an editor's line end is nobody's intention."""
    hub = Hub.from_env({"HF_ENDPOINT": local.url, "HF_TOKEN": around.format(CANARY)})
    assert hub.token == CANARY
    hub.resolve("o/r")
    assert local.seen[-1].headers["authorization"] == f"Bearer {CANARY}"


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_a_token_that_cannot_be_one_is_refused_by_its_name(value: str, tmp_path: Path) -> None:
    """The variable is named; the value is in no message, no cause and no log."""
    hub = Hub.from_env({"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": value})
    for act in (
        lambda: hub.resolve("o/r"),
        lambda: hub.remote("o/r", "c" * 40, "F.gguf"),
        lambda: browse(hub, "o/r"),
    ):
        with pytest.raises(InvalidInput) as refusal:
            act()
        assert "HF_TOKEN" in refusal.value.message
        assert CANARY not in json.dumps(refusal.value.as_json())
        assert refusal.value.__cause__ is None
    assert CANARY not in repr(hub)


@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
def test_credentials_of_a_bucket_are_trimmed_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line end ended the whole process before."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sk")
    monkeypatch.setenv(name, f"{CANARY}\n")
    bucket = bucket_at("s3://bucket/x?endpoint=http://127.0.0.1:9")
    assert CANARY in dict(bucket.open({}, {}).config).values()
    monkeypatch.setenv(name, f'"{CANARY}"')
    with pytest.raises(InvalidInput) as refusal:
        bucket.open({}, {})
    assert name in refusal.value.message
    assert CANARY not in str(refusal.value)


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "http_proxy"])
@pytest.mark.parametrize("scheme", ["socks", "socks5", "socks5h"])
def test_a_proxy_that_is_not_supported_is_named(
    name: str, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One sentence with the variable, wherever the network is used; never a traceback."""
    monkeypatch.setenv(name, f"{scheme}://user:{CANARY}@127.0.0.1:1080/")
    remote = Remote("http://127.0.0.1:9/x", label="x")
    for act in (
        lambda: Hub.from_env().resolve("o/r"),
        lambda: find("a", "1", config=PipConfig(index_urls=("http://127.0.0.1:9/simple",))),
        lambda: download(remote, tmp_path / "x", "0" * 64, 1, folder=tmp_path / "downloads"),
        lambda: bucket_at("s3://bucket/x").open({}, {}),
    ):
        with pytest.raises(InvalidInput) as refusal:
            act()
        assert refusal.value.message.startswith(name)
        assert f"{scheme}://" in refusal.value.message
        assert CANARY not in str(refusal.value)


def test_proxies_over_http_are_fine() -> None:
    """Also one that is written without a scheme."""
    check_proxies({"HTTP_PROXY": "http://p:3128", "https_proxy": "p:3128", "ALL_PROXY": ""})
    assert credential("HF_TOKEN", {}) == ""


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_the_same_everywhere(local: LocalHub, name: str) -> None:
    """Neither lists nor bytes are asked for; doctor says so."""
    hub = Hub.from_env({"HF_ENDPOINT": local.url, name: "1"})
    commit = local.repos["o/r"].refs["main"]
    for act in (
        lambda: hub.resolve("o/r"),
        lambda: hub.files("o/r", commit),
        lambda: hub.remote("o/r", commit, "F.gguf"),
        lambda: browse(hub, "o/r"),
    ):
        with pytest.raises(SourceUnavailable, match=name):
            act()
    found = hub_check(replace(_patient(), hub=hub))
    assert name in found.fact
    assert found.level == "warn"
    assert not local.seen
    assert Hub.from_env({"HF_ENDPOINT": local.url, name: "0"}).resolve("o/r")


def _patient() -> Patient:
    return Patient(home=None, ports=None, facts=None, redis_url="", hub=Hub(""), public_origin="")  # type: ignore[arg-type]


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.pem"
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *private)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


@contextmanager
def tls_server(folder: Path) -> Iterator[str]:
    """A server whose certificate nobody here knows."""

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(folder))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_three_reasons_are_three_sentences_at_once(tmp_path: Path) -> None:
    """An untrusted certificate, a closed port and an unknown name; no second try, no pause."""
    with tls_server(tmp_path) as url:
        at = [url, f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid"]
        said = []
        for endpoint in at:
            hub = Hub(endpoint, policy=ASKED_BY_A_PERSON, report=said.append)
            started = time.monotonic()
            with pytest.raises(SourceUnavailable) as refusal:
                hub.resolve("o/r")
            assert time.monotonic() - started < 5
            said.append(f"{refusal.value.message} {refusal.value.remedy}")
    certificate, port, name = said
    assert "SSL_CERT_FILE" in certificate
    assert "certificate" in certificate
    assert "refuses" in port
    assert "name" in name
    assert "no-such-host.invalid" in name


def test_a_download_does_not_repeat_what_cannot_change(tmp_path: Path) -> None:
    """An untrusted certificate is told at the first try."""
    lines: list[str] = []
    with tls_server(tmp_path) as url, pytest.raises(SourceUnavailable) as refusal:
        download(
            Remote(f"{url}/x", label="x"),
            tmp_path / "x",
            "0" * 64,
            1,
            folder=tmp_path / "downloads",
            policy=Policy(backoff_s=60),
            log=lines.append,
        )
    assert "SSL_CERT_FILE" in refusal.value.remedy
    assert not [line for line in lines if "again" in line]


def test_other_failures_are_not_explained() -> None:
    """What may be anything stays what it is."""
    assert why_silent(TimeoutError(), "h") is None


def test_a_mirror_without_the_tree_api_is_asked_for_its_siblings(local: LocalHub) -> None:
    """The commit's own list has the same digests and sizes."""
    commit = local.repos["o/r"].refs["main"]
    hub = Hub(local.url, policy=Policy(attempts=2, backoff_s=0))
    expected = hub.files("o/r", commit)
    local.fail("/tree/", status(404))
    assert hub.files("o/r", commit) == expected


def test_a_mirror_that_tells_no_digests_is_said_to(local: LocalHub) -> None:
    """Not "it does not exist": the repository does."""
    local.plain_siblings = True
    local.fail("/tree/", status(404))
    commit = local.repos["o/r"].refs["main"]
    with pytest.raises(SourceUnavailable) as refusal:
        Hub(local.url).files("o/r", commit)
    assert type(refusal.value) is SourceUnavailable
    assert "tree" in refusal.value.message


def test_nothing_but_what_is_wanted_is_asked_of_the_hub(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library asks which programs are agents before its first question, unless it is told."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", None)
    monkeypatch.setattr(constants, "ENDPOINT", local.url)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"))
    browse(Hub(local.url), "o/r")
    assert {seen.path.split("/")[2] for seen in local.seen} == {"models"}
