"""The hub through the real huggingface_hub, against a local hub over real HTTP."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from mmadmin.core.errors import (
    DigestMismatch,
    Gated,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.core.recipes.fetch import RECIPE as FETCH
from mmadmin.host.hub import (
    API_TIMEOUT_S,
    ASKED_BY_A_PERSON,
    CONNECT_TIMEOUT_S,
    TIMEOUTS,
    Hub,
)
from mmadmin.host.policy import Policy
from tests.support.hub import LocalHub, local_hub, status
from tests.support.tools import attempt

BIG = b"GGUF" + bytes(5000)
OTHER = b"GGUF" + bytes(6000)
TOKEN = "hf_canary_9d1c"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A running hub that `Hub.from_env` finds."""
    with local_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nonexistent")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def quick(local: LocalHub, token: str | None = None) -> Hub:
    """A hub that does not wait long."""
    return Hub(local.url, token, Policy(backoff_s=0.01, attempts=3))


def test_a_branch_is_resolved_once_and_files_come_with_digests(local: LocalHub) -> None:
    """Commit, sizes and LFS digests are what the hub has; small files have a git id only."""
    commit = local.repo("team/model").commit({"sub/m.gguf": BIG, "README.md": b"hello"})
    hub = Hub.from_env()
    assert hub.resolve("team/model", "main") == (commit, "team/model")
    assert hub.resolve("team/model", commit) == (commit, "team/model")
    small, big = hub.files("team/model", commit)
    assert (small.path, small.size, small.sha256) == ("README.md", 5, None)
    assert (big.path, big.size) == ("sub/m.gguf", len(BIG))
    assert big.sha256 == hashlib.sha256(BIG).hexdigest()
    assert hub.small_file("team/model", commit, small) == b"hello"


def test_small_files_are_checked_against_their_git_id(local: LocalHub) -> None:
    """A proxy that changes a small file is caught although there is no sha256."""
    repo = local.repo("team/model")
    commit = repo.commit({"config.json": b"{}"})
    hub = Hub.from_env()
    (file,) = hub.files("team/model", commit)
    repo.commits[commit].files["config.json"] = b"[]"  # type: ignore[index]
    with pytest.raises(DigestMismatch, match="not those of the commit"):
        hub.small_file("team/model", commit, file)


def pins(hub: Hub, repo: str, commit: str) -> dict[str, object]:
    """Fetch params for every file of a commit, as a lock has them."""
    files = [
        {
            "path": file.path,
            "sha256": file.sha256,
            "size": file.size,
            "source": {"kind": "hub", "repo": repo, "revision": commit, "path": file.path},
        }
        for file in hub.files(repo, commit)
    ]
    return {"files": files}


def test_the_commit_stays_pinned_while_main_moves(local: LocalHub, tmp_path: Path) -> None:
    """`main` moves between two files; both come from the commit that was resolved."""
    repo = local.repo("team/model")
    first = repo.commit({"a.gguf": BIG, "b.gguf": OTHER})
    hub = Hub.from_env()
    commit, _ = hub.resolve("team/model")
    params = pins(hub, "team/model", commit)
    repo.commit({"a.gguf": OTHER, "b.gguf": BIG})
    out = attempt(tmp_path).build(FETCH, params)  # type: ignore[arg-type]
    assert commit == first
    assert (out / "a.gguf").read_bytes() == BIG
    assert (out / "b.gguf").read_bytes() == OTHER
    asked = [seen.path for seen in local.requests("resolve")]
    assert asked
    assert all(commit in path for path in asked)


def test_a_vanished_commit_is_a_clear_error(local: LocalHub, tmp_path: Path) -> None:
    """A force push that removed the pinned commit is said, with what to do."""
    repo = local.repo("team/model")
    commit = repo.commit({"a.gguf": BIG})
    params = pins(Hub.from_env(), "team/model", commit)
    del repo.commits[commit]
    with pytest.raises(SourceMissing, match="does not exist there"):
        attempt(tmp_path).build(FETCH, params)  # type: ignore[arg-type]
    with pytest.raises(SourceMissing, match="revision does not exist"):
        Hub.from_env().resolve("team/model", commit)


def test_the_real_library_downloads_from_the_local_hub(local: LocalHub, tmp_path: Path) -> None:
    """The local hub is honest enough for huggingface_hub's own download."""
    commit = local.repo("team/model").commit({"m.gguf": BIG, "note.txt": b"hi"})
    for name, content in (("m.gguf", BIG), ("note.txt", b"hi")):
        found = hf_hub_download(
            "team/model",
            name,
            revision=commit,
            cache_dir=tmp_path,
            endpoint=local.url,
            token=False,
        )
        assert Path(found).read_bytes() == content


def test_private_gated_and_missing_are_told_apart(local: LocalHub) -> None:
    """Three refusals, three messages with their remedies, one request each."""
    local.repo("team/gated", gated=True).commit({"m.gguf": BIG})
    local.repo("team/private", token=TOKEN).commit({"m.gguf": BIG})
    local.repo("team/open").commit({"m.gguf": BIG})
    hub = quick(local)
    with pytest.raises(Unauthorized, match=r"private.*HF_TOKEN"):
        hub.resolve("team/private")
    with pytest.raises(Gated, match="licence"):
        hub.resolve("team/gated")
    with pytest.raises(SourceMissing, match="revision does not exist"):
        hub.resolve("team/open", "no-such-branch")
    with pytest.raises(SourceMissing, match="no such repository"):
        quick(local, "hf_other").resolve("team/none")
    with pytest.raises(SourceMissing, match="owner/name"):
        hub.resolve("not a name!")
    assert len(local.seen) == 4
    assert Hub(local.url, TOKEN).resolve("team/private")


def test_the_token_is_used_but_never_shown(
    local: LocalHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the environment or the token file, in the header to the hub, in no text of ours."""
    caplog.set_level(logging.DEBUG)
    repo = local.repo("team/private", token=TOKEN)
    commit = repo.commit({"m.gguf": BIG})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub = Hub.from_env()
    assert hub.resolve("team/private")[0] == commit
    work = attempt(tmp_path, hub=hub)
    work.build(FETCH, pins(hub, "team/private", commit))  # type: ignore[arg-type]
    local.fail("resolve", *[status(403)] * 9)
    again = attempt(tmp_path / "again", hub=hub)
    with pytest.raises(Gated) as caught:
        again.build(FETCH, pins(hub, "team/private", commit))  # type: ignore[arg-type]
    said = [repr(hub), work.log, again.log, str(caught.value), repr(caught.value.details)]
    assert "canary" not in "".join([*said, caplog.text])


def test_too_many_requests_are_waited_out_up_to_a_cap(local: LocalHub) -> None:
    """Retry-After is honoured; an hour of it is refused with a message."""
    commit = local.repo("team/model").commit({"m.gguf": BIG})
    local.fail("/api/", status(429, Retry_After="1"))
    started = time.monotonic()
    assert quick(local).resolve("team/model")[0] == commit
    assert time.monotonic() - started >= 1
    local.fail("/api/", *[status(429, Retry_After="7200")] * 9)
    with pytest.raises(RateLimited, match="7200 s"):
        quick(local).resolve("team/model")


@pytest.mark.parametrize(
    ("code", "error"), [(429, RateLimited), (500, SourceUnavailable), (503, SourceUnavailable)]
)
def test_an_answered_error_keeps_its_status(
    local: LocalHub, code: int, error: type[SourceUnavailable]
) -> None:
    """A hub that answers, though with an error, is never said not to answer."""
    local.repo("team/model").commit({"m.gguf": BIG})
    local.fail("/api/", *[status(code)] * 9)
    said: list[str] = []
    hub = replace(quick(local), report=said.append)
    with pytest.raises(error, match=f"answered {code}") as refused:
        hub.resolve("team/model")
    assert type(refused.value) is error
    assert refused.value.details["status"] == code
    assert "network" not in refused.value.remedy
    assert said
    assert all(f"answered {code}" in line for line in said)


def test_an_unreachable_hub_is_given_up_in_words() -> None:
    """Nobody listens: each further try is said, then the remedy."""
    said: list[str] = []
    policy = Policy(backoff_s=0.01, attempts=3)
    with pytest.raises(SourceUnavailable, match=r"the hub at 127\.0\.0\.1:9 .*HF_ENDPOINT"):
        Hub("http://user:canary@127.0.0.1:9", policy=policy, report=said.append).resolve("a/b")
    assert [line.split("(")[-1] for line in said] == ["2 of 3)", "3 of 3)"]
    assert all(line.startswith("127.0.0.1:9 does not answer (Connect") for line in said)


def test_a_connection_is_waited_for_less_long_than_an_answer() -> None:
    """Both of the hub's questions have it: a hub that is away is told in seconds."""
    assert TIMEOUTS.connect == CONNECT_TIMEOUT_S < TIMEOUTS.read == API_TIMEOUT_S
    assert ASKED_BY_A_PERSON.attempts < Policy().attempts
