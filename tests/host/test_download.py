"""Downloads: resumed, verified, polite, and plain about what went wrong."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.errors import (
    Cancelled,
    DigestMismatch,
    DiskFull,
    Gated,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.host.download import Remote, copy_hashed, download, files, retry_after
from mmadmin.host.policy import Policy
from tests.support.disks import needs_root, small_disk
from tests.support.hub import (
    Handler,
    LocalHub,
    as_usual,
    busy,
    drop,
    held,
    instead,
    local_hub,
    no_ranges,
    status,
    stuck,
)
from tests.support.models import LFS_POINTER

SEGMENT = 1 << 16
PATIENCE_S = 60.0
DATA = random.Random(1).randbytes(10 * SEGMENT + 123)
SHA = hashlib.sha256(DATA).hexdigest()
QUICK = Policy(segment_bytes=SEGMENT, backoff_s=0.01, stall_s=60.0, attempts=4)


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A server with one file."""
    with local_hub() as running:
        running.plain["file.bin"] = DATA
        yield running


def fetch(hub: LocalHub, folder: Path, **options: object) -> Path:
    """Download the file with the pins of DATA unless told otherwise."""
    to = folder / "out.bin"
    arguments = {
        "remote": Remote(f"{hub.url}/file.bin", "file.bin"),
        "sha256": SHA,
        "size": len(DATA),
        "policy": QUICK,
        **options,
    }
    remote, sha256, size = (arguments.pop(name) for name in ("remote", "sha256", "size"))
    download(remote, to, sha256, size, folder=folder / "downloads", **arguments)  # type: ignore[arg-type]
    return to


def test_a_download_arrives_verified_and_leaves_nothing_behind(
    hub: LocalHub, tmp_path: Path
) -> None:
    """The bytes are right, each is transferred once, over several connections, with progress."""
    seen: list[int] = []
    to = fetch(hub, tmp_path, progress=lambda done, total: seen.append(done))
    assert to.read_bytes() == DATA
    assert hub.sent == len(DATA)
    assert seen[-1] == len(DATA)
    assert not list((tmp_path / "downloads").iterdir())


def test_a_huge_file_is_not_thousands_of_requests(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments grow with the file, so that a hub's request limit is not used up."""
    monkeypatch.setattr(files, "MOST_SEGMENTS", 4)
    assert fetch(hub, tmp_path).read_bytes() == DATA
    assert len(hub.requests("file.bin")) == 4


def test_an_empty_file_is_a_file(hub: LocalHub, tmp_path: Path) -> None:
    """Zero bytes need no transfer and have their digest."""
    to = fetch(hub, tmp_path, sha256=hashlib.sha256(b"").hexdigest(), size=0)
    assert to.read_bytes() == b""


@pytest.mark.parametrize("after", [0, 1, 1000, SEGMENT - 1, SEGMENT])
def test_a_dropped_connection_is_resumed(hub: LocalHub, tmp_path: Path, after: int) -> None:
    """A connection that breaks at any byte costs at most its segment."""
    hub.fail("file.bin", *[drop(after)] * 3)
    assert fetch(hub, tmp_path).read_bytes() == DATA
    assert hub.sent <= len(DATA) + 3 * SEGMENT


KILLED = """
import sys
from pathlib import Path
from mmadmin.host.download import Remote, download
from mmadmin.host.policy import Policy
url, folder, sha, size = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
print("started", flush=True)
download(Remote(url, "file.bin"), folder / "out.bin", sha, size, folder=folder / "downloads",
         policy=Policy(segment_bytes=65536, connections=2, backoff_s=0.01, stall_s=3600.0))
"""


def until(holds: Callable[[], object]) -> None:
    """Wait for what a thread or a child does."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


@contextmanager
def killed(hub: LocalHub, folder: Path, *, good: int, after: int) -> Iterator[None]:
    """A download in a child, killed when so many segments have come and two more have begun.

    The two have got `after` bytes each. The block runs just before the kill.
    """
    end = threading.Event()
    asked, sent = len(hub.requests("file.bin")), hub.sent
    hub.fail("file.bin", *[as_usual] * good, *[stuck(end, after)] * 2)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, f"{hub.url}/file.bin", str(folder), SHA, str(len(DATA))],
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        until(lambda: len(hub.requests("file.bin")) == asked + good + 2)
        until(lambda: hub.sent == sent + good * SEGMENT + 2 * after)
        yield
    finally:
        child.kill()
        child.wait()
        end.set()


def test_a_killed_download_goes_on_where_it_was(hub: LocalHub, tmp_path: Path) -> None:
    """After SIGKILL only what was not finished is transferred; the result is verified."""
    with killed(hub, tmp_path, good=4, after=1000):
        pass
    done = json.loads((tmp_path / "downloads" / f"{SHA}.state").read_text())["done"]
    assert len(done) == 4
    assert not (tmp_path / "out.bin").exists()
    hub.sent = 0
    lines: list[str] = []
    assert fetch(hub, tmp_path, log=lines.append).read_bytes() == DATA
    assert hub.sent == len(DATA) - 4 * SEGMENT
    assert any("are here already" in line for line in lines)


def test_kills_at_any_byte_cost_only_what_was_unfinished(hub: LocalHub, tmp_path: Path) -> None:
    """Killed again and again, at random bytes: the transfers add up to the file and little more."""
    chance = random.Random(7)
    lost = 0
    for _ in range(3):
        after = chance.randrange(SEGMENT)
        with killed(hub, tmp_path, good=chance.randrange(4), after=after):
            lost += 2 * after
    assert fetch(hub, tmp_path).read_bytes() == DATA
    assert hub.sent == len(DATA) + lost


@pytest.mark.parametrize("torn", [b"", b"{", b'{"size": 1}', b'{"size": "x", "done": 3}'])
def test_a_torn_state_file_means_starting_over(hub: LocalHub, tmp_path: Path, torn: bytes) -> None:
    """A state that cannot be read is not believed."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / f"{SHA}.part").write_bytes(b"\0" * len(DATA))
    (folder / f"{SHA}.state").write_bytes(torn)
    assert fetch(hub, tmp_path).read_bytes() == DATA


def test_a_lying_part_file_is_caught_by_its_digest(hub: LocalHub, tmp_path: Path) -> None:
    """Segments marked as finished that hold other bytes never reach the store."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / f"{SHA}.part").write_bytes(b"\0" * len(DATA))
    state = {"size": len(DATA), "segment": SEGMENT, "etag": "", "done": [0, 1]}
    (folder / f"{SHA}.state").write_text(json.dumps(state))
    with pytest.raises(DigestMismatch):
        fetch(hub, tmp_path)
    assert fetch(hub, tmp_path).read_bytes() == DATA  # and the next attempt starts clean


def test_a_source_that_ignores_ranges_is_read_in_one_go(hub: LocalHub, tmp_path: Path) -> None:
    """200 where 206 was asked for: the file restarts as one stream."""
    hub.fail("file.bin", *[no_ranges] * 20)
    lines: list[str] = []
    assert fetch(hub, tmp_path, log=lines.append).read_bytes() == DATA
    assert any("cannot resume" in line for line in lines)


def test_a_file_that_changes_under_us_is_fetched_anew(hub: LocalHub, tmp_path: Path) -> None:
    """If-Range: segments of an older file are not mixed with those of a newer one."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / f"{SHA}.part").write_bytes(b"\0" * len(DATA))
    state = {"size": len(DATA), "segment": SEGMENT, "etag": '"older"', "done": [0, 1, 2]}
    (folder / f"{SHA}.state").write_text(json.dumps(state))
    assert fetch(hub, tmp_path).read_bytes() == DATA
    ranged = [seen.headers.get("If-Range") for seen in hub.requests("file.bin")]
    assert '"older"' in ranged


def test_a_flipped_byte_is_refused_and_kept_under_its_true_name(
    hub: LocalHub, tmp_path: Path
) -> None:
    """Right size, wrong byte: refused; with the corrected pin nothing is transferred again."""
    other = bytes([DATA[0] ^ 1]) + DATA[1:]
    hub.plain["file.bin"] = other
    with pytest.raises(DigestMismatch) as caught:
        fetch(hub, tmp_path)
    true = hashlib.sha256(other).hexdigest()
    assert caught.value.details["actual"] == true
    assert Path(caught.value.details["path"]).read_bytes() == other
    hub.sent = 0
    assert fetch(hub, tmp_path, sha256=true).read_bytes() == other
    assert hub.sent == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE html><html>log in</html>", "a web page"),
        (LFS_POINTER.encode(), "a Git-LFS pointer"),
        (b"x" * 100, "100 bytes where the pin says"),
    ],
)
def test_other_content_with_200_is_named_for_what_it_is(
    hub: LocalHub, tmp_path: Path, body: bytes, words: str
) -> None:
    """A login page, a pointer and a short body are told apart, at once and without retries."""
    hub.fail("file.bin", *[instead(body)] * 4)
    with pytest.raises(DigestMismatch, match=words):
        fetch(hub, tmp_path)
    assert len(hub.requests("file.bin")) <= QUICK.connections


def test_a_web_page_of_the_right_size_is_named_too(hub: LocalHub, tmp_path: Path) -> None:
    """When the size happens to fit, the digest decides and the words still help."""
    page = b"<html>" + b" " * 94
    hub.plain["file.bin"] = page
    with pytest.raises(DigestMismatch, match="a web page"):
        fetch(hub, tmp_path, size=100, sha256="0" * 64)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (401, Unauthorized, "HF_TOKEN"),
        (403, Gated, "licence"),
        (404, SourceMissing, "does not exist"),
    ],
)
def test_refusals_are_told_apart_and_not_retried(
    hub: LocalHub, tmp_path: Path, code: int, kind: type[Exception], words: str
) -> None:
    """401, 403 and 404 mean three different things and one request each is enough."""
    hub.fail("file.bin", *[status(code)] * 20)
    with pytest.raises(kind, match=words):
        fetch(hub, tmp_path, policy=Policy(connections=1, segment_bytes=SEGMENT))
    assert len(hub.requests("file.bin")) == 1


def test_retry_after_is_waited_for(hub: LocalHub, tmp_path: Path) -> None:
    """A 429 that asks for a second gets at least a second."""
    hub.fail("file.bin", status(429, Retry_After="1"))
    started = time.monotonic()
    policy = Policy(connections=1, segment_bytes=SEGMENT, backoff_s=0.01)
    assert fetch(hub, tmp_path, policy=policy).read_bytes() == DATA
    assert time.monotonic() - started >= 1.0


def test_connections_that_fail_together_use_up_one_attempt(hub: LocalHub, tmp_path: Path) -> None:
    """A source that is busy for a while is waited for, however many connections ask it."""
    hub.fail("file.bin", *busy(1.0, status(503)))
    policy = replace(QUICK, connections=4, attempts=6, backoff_s=0.2)
    said: list[str] = []
    assert fetch(hub, tmp_path, policy=policy, log=said.append).read_bytes() == DATA
    pauses = [float(line.split()[-2]) for line in said if "trying again" in line]
    assert 2 <= len(pauses) <= 5
    assert pauses[-1] > pauses[0]


def test_a_wait_that_the_source_asks_for_holds_for_every_connection(
    hub: LocalHub, tmp_path: Path
) -> None:
    """Whoever is told to wait tells the others: none asks again before."""
    hub.fail("file.bin", *busy(0.9, status(429, Retry_After="1")))
    policy = replace(QUICK, connections=4, attempts=2)
    assert fetch(hub, tmp_path, policy=policy).read_bytes() == DATA
    assert len(hub.requests("file.bin")) <= 4 + 11


def test_a_wait_beyond_the_cap_is_a_refusal(hub: LocalHub, tmp_path: Path) -> None:
    """An hour of Retry-After is said, not sat out."""
    hub.fail("file.bin", *[status(429, Retry_After="3600")] * 4)
    with pytest.raises(RateLimited, match="3600 s"):
        fetch(hub, tmp_path)


def test_server_errors_are_retried_with_a_limit(hub: LocalHub, tmp_path: Path) -> None:
    """503 passes after a while; a source that never recovers is given up, bytes kept."""
    hub.fail("file.bin", status(503), status(502))
    assert fetch(hub, tmp_path).read_bytes() == DATA
    (tmp_path / "out.bin").unlink()
    hub.fail("file.bin", *[status(503)] * 5000)
    with pytest.raises(SourceUnavailable, match="gave up after 4 attempts"):
        fetch(hub, tmp_path)


def test_a_stalled_connection_is_replaced(hub: LocalHub, tmp_path: Path) -> None:
    """A connection that goes mute is dropped after the stall time and the rest still arrives."""
    hub.plain["small.bin"] = DATA[:SEGMENT]
    end = threading.Event()
    hub.fail("small.bin", stuck(end, 100))
    started = time.monotonic()
    to = fetch(
        hub,
        tmp_path,
        remote=Remote(f"{hub.url}/small.bin", "small.bin"),
        sha256=hashlib.sha256(DATA[:SEGMENT]).hexdigest(),
        size=SEGMENT,
        policy=Policy(segment_bytes=SEGMENT, backoff_s=0.01, stall_s=1.0, attempts=60),
    )
    assert to.read_bytes() == DATA[:SEGMENT]
    assert time.monotonic() - started > 0.9
    end.set()


def test_cancel_does_not_wait_for_the_source_and_keeps_what_is_there(
    hub: LocalHub, tmp_path: Path
) -> None:
    """Cancelled while every connection is mute: it ends although not one of them does."""
    end = threading.Event()
    hub.fail("file.bin", *[stuck(end)] * QUICK.connections)
    with pytest.raises(Cancelled):
        fetch(hub, tmp_path, cancelled=lambda: len(hub.requests("file.bin")) == QUICK.connections)
    end.set()
    assert fetch(hub, tmp_path).read_bytes() == DATA


def test_two_wants_of_one_file_are_one_transfer(hub: LocalHub, tmp_path: Path) -> None:
    """The second asks nothing: it waits for the first one's bytes."""
    go_on = threading.Event()
    hub.fail("file.bin", *[held(go_on)] * QUICK.connections)
    lines: list[str] = []

    def want(name: str) -> None:
        (tmp_path / name).mkdir()
        download(
            Remote(f"{hub.url}/file.bin", "file.bin"),
            tmp_path / name / "out.bin",
            SHA,
            len(DATA),
            folder=tmp_path / "downloads",
            policy=QUICK,
            log=lines.append,
            already=(tmp_path / "first" / "out.bin").exists,
        )

    first = threading.Thread(target=want, args=("first",))
    first.start()
    until(lambda: hub.requests("file.bin"))
    second = threading.Thread(target=want, args=("second",))
    second.start()
    until(lambda: any("waiting for another download" in line for line in lines))
    go_on.set()
    first.join()
    second.join()
    assert hub.sent == len(DATA)


def test_credentials_go_to_their_host_only_and_into_no_message(
    hub: LocalHub, tmp_path: Path
) -> None:
    """A redirect to another host loses the token; errors and logs never show it."""
    repo = hub.repo("team/model", token="hf_canary_51")
    commit = repo.commit({"model.gguf": DATA})
    remote = Remote(
        f"{hub.url}/team/model/resolve/{commit}/model.gguf",
        "team/model",
        {"Authorization": "Bearer hf_canary_51"},
    )
    lines: list[str] = []
    hub.fail("cdn", status(503))
    assert fetch(hub, tmp_path, remote=remote, log=lines.append).read_bytes() == DATA
    assert all("Authorization" in seen.headers for seen in hub.requests("resolve"))
    assert hub.requests("cdn")
    assert not any("Authorization" in seen.headers for seen in hub.requests("cdn"))
    hub.fail("resolve", *[status(401)] * 8)
    (tmp_path / "out.bin").unlink()
    with pytest.raises(Unauthorized) as caught:
        fetch(hub, tmp_path, remote=remote, log=lines.append)
    assert "canary" not in str(caught.value) + repr(caught.value.details) + "".join(lines)


def test_an_address_that_leads_nowhere_is_said_at_once(hub: LocalHub, tmp_path: Path) -> None:
    """A redirect without an end and an impossible address are no reason to try again."""

    def round_and_round(handler: Handler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", f"{hub.url}/file.bin")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    hub.fail("file.bin", *[round_and_round] * 200)
    for url in (f"{hub.url}/file.bin", "http://exa mple.invalid:x/"):
        with pytest.raises(SourceUnavailable, match="check the source's address"):
            fetch(hub, tmp_path, remote=Remote(url, "file.bin"))


@needs_root
def test_a_full_disk_is_said_before_the_transfer(hub: LocalHub, tmp_path: Path) -> None:
    """Room for the whole file is reserved first; nothing is transferred without it."""
    with (
        small_disk(tmp_path / "full", "256k") as full,
        pytest.raises(DiskFull, match=f"reserving {len(DATA)} bytes"),
    ):
        fetch(hub, full)
    assert hub.sent == 0


def test_a_local_copy_is_hashed_on_the_way(tmp_path: Path) -> None:
    """One pass: the digest comes with the copy."""
    (tmp_path / "a").write_bytes(DATA)
    assert copy_hashed(tmp_path / "a", tmp_path / "b") == SHA
    assert (tmp_path / "b").read_bytes() == DATA
    with pytest.raises(SourceMissing, match="No such file"):
        copy_hashed(tmp_path / "none", tmp_path / "c")


def test_retry_after_is_read_in_both_its_forms() -> None:
    """Seconds and HTTP dates; nonsense is nothing."""
    assert retry_after({"retry-after": "3"}) == 3
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None
