"""Binary caches in buckets: what is theirs alone. What they share with others is in `test_caches.py`."""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import (
    Cancelled,
    Gated,
    InvalidInput,
    MmError,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    StoreCorrupt,
    Unauthorized,
)
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.core.store.attestations import SigningKey, Trust
from mmadmin.core.store.binary_cache import bytes_path
from mmadmin.core.store.push import push
from mmadmin.core.store.substitute import Substituter
from mmadmin.host.binary_caches import (
    READ_BYTES,
    BucketCache,
    cache_at,
    configured_caches,
    writable_cache_at,
)
from mmadmin.host.bucket import Bucket, bucket_at
from tests.core.store.test_substitute import goal
from tests.core.workshop import Shop, Watch, add, damage, tools_for
from tests.support.caches import (
    CANARY,
    PART_BYTES,
    Refusing,
    Watched,
    bucket_cache,
    running,
    static,
)

ALICE = SigningKey.generate("alice")
LARGE = bytes(range(256)) * 60_000  # 15 MB: three parts
SHA256 = hashlib.sha256(LARGE).hexdigest()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(s3: str) -> Watched:
    """An empty bucket."""
    return bucket_cache(s3)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that pushes."""
    return Store(tmp_path / "one", floor_bytes=0)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """The store that pulls."""
    return Store(tmp_path / "two", floor_bytes=0)


def quick(endpoint: str, *, name: str = "bucket") -> BucketCache:
    """A cache that does not pause between attempts."""
    bucket = Bucket(name, "", endpoint, "us-east-1")
    return BucketCache(bucket, pause_s=0.001, part_bytes=PART_BYTES)


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "env", "bucket"),
    [
        ("s3://models", {}, Bucket("models", "")),
        ("s3://models/", {}, Bucket("models", "")),
        ("s3://models/team/a/", {}, Bucket("models", "team/a")),
        ("s3://models?region=eu-west-1", {}, Bucket("models", "", "", "eu-west-1")),
        (
            "s3://models",
            {"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"},
            Bucket("models", "", "", "a"),
        ),
        (
            "s3://models",
            {"AWS_REGION": "", "AWS_DEFAULT_REGION": "b"},
            Bucket("models", "", "", "b"),
        ),
        ("s3://models", {"AWS_REGION": "", "AWS_ENDPOINT_URL": ""}, Bucket("models", "")),
        (
            "s3://models/x?endpoint=https://s3.example.org/&region=here",
            {"AWS_ENDPOINT_URL": "https://other.example.org"},
            Bucket("models", "x", "https://s3.example.org", "here"),
        ),
        (
            "s3://models",
            {
                "AWS_ENDPOINT_URL": "https://any.example.org",
                "AWS_ENDPOINT_URL_S3": "http://10.0.0.7:9000",
            },
            Bucket("models", "", "http://10.0.0.7:9000"),
        ),
    ],
)
def test_addresses(address: str, env: dict[str, str], bucket: Bucket) -> None:
    """Bucket, prefix, endpoint and region; the address goes before the environment."""
    assert bucket_at(address, env) == bucket


@pytest.mark.parametrize(
    "address",
    [
        "s3://",
        "s3:///prefix",
        "s3://Models",
        "s3://models/a b",
        "s3://models/a//b",
        "s3://models#x",
        f"s3://name:{CANARY}@models",
        f"s3://models?secret_access_key={CANARY}",
        "s3://models?region=a&region=b",
        "s3://models?endpoint=s3.example.org",
        f"s3://models?endpoint=https://name:{CANARY}@s3.example.org",
    ],
)
def test_bad_addresses_are_refused_without_repeating_secrets(address: str) -> None:
    """In words, with the right form; what may be a secret is not said again."""
    with pytest.raises(InvalidInput) as refused:
        bucket_at(address, {})
    assert CANARY not in str(refused.value)


def test_where_s3_addresses_may_stand(s3: str, tmp_path: Path) -> None:
    """As the cache of a command, and in the configuration; nothing else is pushed to but folders."""
    address = f"s3://models/x?endpoint={s3}"
    assert isinstance(cache_at(address), BucketCache)
    assert writable_cache_at(address).label == "s3://models/x"
    home = Home(tmp_path)
    (home.root / "substituters.json").write_text(json.dumps({"caches": [address]}))
    caches, _ = configured_caches(home)
    assert [cache.label for cache in caches] == ["s3://models/x"]
    with pytest.raises(InvalidInput, match="nothing can be pushed over http"):
        writable_cache_at("https://cache.example.org")


# --- sending -----------------------------------------------------------------------------------


def test_large_files_go_in_parts_and_come_back(cache: Watched, tmp_path: Path) -> None:
    """Progress is told all the way, in both directions; nothing unfinished stays."""
    (tmp_path / "large").write_bytes(LARGE)
    sent: list[tuple[int, int]] = []
    cache.put("blobs/x", tmp_path / "large", SHA256, lambda *now: sent.append(now))
    assert sent == sorted(sent)
    assert len(sent) > 10
    assert sent[-1] == (len(LARGE), len(LARGE))
    assert cache.files.unfinished() == []
    assert cache.has("blobs/x", len(LARGE))
    assert not cache.has("blobs/x", len(LARGE) + 1)
    got: list[tuple[int, int]] = []
    assert cache.fetch("blobs/x", tmp_path / "part", len(LARGE), lambda *n: got.append(n)) == SHA256
    assert (tmp_path / "part").read_bytes() == LARGE
    assert got[-1] == (len(LARGE), len(LARGE))


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_sizes(cache: Watched, tmp_path: Path, content: bytes) -> None:
    """Empty, in one piece, in parts: each comes back as it was."""
    sha256 = hashlib.sha256(content).hexdigest()
    (tmp_path / "file").write_bytes(content)
    cache.put("x", tmp_path / "file", sha256, silent)
    assert cache.has("x", len(content))
    assert cache.fetch("x", tmp_path / "part", len(content), silent) == sha256
    assert (tmp_path / "part").read_bytes() == content


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_damaged_file_is_not_sent(cache: Watched, tmp_path: Path, content: bytes) -> None:
    """Bytes that are not what their name says never appear in a bucket."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged"):
        cache.put("x", tmp_path / "file", "0" * 64, silent)
    assert not cache.has("x", len(content))
    assert cache.files.unfinished() == []


def test_a_cancelled_upload_is_taken_back(cache: Watched, tmp_path: Path) -> None:
    """Nothing appears, and no part stays to be paid for."""
    (tmp_path / "large").write_bytes(LARGE)

    def cancel(done: int, total: int) -> None:
        if done > total * 2 // 3:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        cache.put("x", tmp_path / "large", SHA256, cancel)
    assert not cache.has("x", len(LARGE))
    assert cache.files.unfinished() == []


def test_a_file_that_cannot_be_read_is_no_fault_of_the_bucket(
    cache: Watched, tmp_path: Path
) -> None:
    """The error is that of the disk."""
    (tmp_path / "large").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="large"):
        cache.put("x", tmp_path / "large", SHA256, silent)


KILLED = """
import os, signal, sys
from pathlib import Path
from mmadmin.core.store import Store
from mmadmin.core.store.attestations import SigningKey
from mmadmin.core.store.push import push
from mmadmin.host.binary_caches import BucketCache
from mmadmin.host.bucket import Bucket
root, name, endpoint, bucket, prefix, at = sys.argv[1:]
def progress(done, total):
    if done >= int(at):
        os.kill(os.getpid(), signal.SIGKILL)
cache = BucketCache(Bucket(bucket, prefix, endpoint, "us-east-1"), part_bytes=5 << 20)
push(Store(Path(root), floor_bytes=0), [name], cache, signer=SigningKey.generate("k"), progress=progress)
"""


@pytest.mark.parametrize("at", [1, len(LARGE), len(LARGE) + 30_000])
def test_a_killed_push_goes_on(store: Store, other: Store, cache: Watched, at: int) -> None:
    """Killed in the large file or among the small ones: no claim and no record without its bytes.

    The next push sends only what is not there.
    """
    files = {f"small{n}": f"{n}".encode() * 10_000 for n in range(9)}
    found = add(store, "model", {"large": LARGE, **files})
    bucket = cache.writer.bucket  # type: ignore[attr-defined]
    arguments = [str(store.root), found.name, bucket.endpoint, bucket.name, bucket.prefix, str(at)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    there = set(cache.files.paths(""))
    assert {path.partition("/")[0] for path in there} <= {"blobs"}
    done = push(store, [found.name], cache, signer=ALICE)
    blobs = {bytes_path(entry.sha256) for entry in found.files}
    # what was on the way when it was killed may have arrived since
    assert not set(cache.sent) & there
    assert done.blobs == len(set(cache.sent) & blobs)
    assert set(cache.files.paths("blobs")) == blobs
    with other.lease("t") as lease:
        assert Substituter(other, [cache], Trust({})).pull(found.name, lease)
    assert damage(other) == []


# --- getting -----------------------------------------------------------------------------------


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    """The folder of a server that an S3 library takes for a bucket with one large file."""
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    (tmp_path / "served" / "bucket" / "large").write_bytes(LARGE)
    return tmp_path / "served"


def test_a_part_of_an_earlier_process_is_gone_on_with(
    s3: str, behind: Path, tmp_path: Path
) -> None:
    """Whatever was transferred before a kill is not transferred again, at any byte."""
    for have in (1, 65_537, len(LARGE) - 1, len(LARGE), len(LARGE) + 5):
        (tmp_path / "part").write_bytes(LARGE[:have].ljust(have, b"x"))
        server = static(behind, ranges=True)
        with running(server) as url:
            assert quick(url).fetch("large", tmp_path / "part", len(LARGE), silent) == SHA256
        assert server.asked == [f"bytes={have}-" if have < len(LARGE) else ""]  # type: ignore[attr-defined]


def test_a_transfer_that_breaks_goes_on_where_it_stopped(
    s3: str, behind: Path, tmp_path: Path
) -> None:
    """Connections that end early lose next to nothing: the rest is asked for."""
    server = static(behind, ranges=True, cut=lambda n: 1_000_000 if n < 12 else None)
    with running(server) as url:
        assert quick(url).fetch("large", tmp_path / "part", len(LARGE), silent) == SHA256
    asked = [int(one[6:].partition("-")[0] or 0) for one in server.asked]  # type: ignore[attr-defined]
    assert asked[0] == 0
    for before, after in itertools.pairwise(asked):
        assert 1_000_000 - READ_BYTES < after - before <= 1_000_000


def test_a_server_that_always_breaks_is_given_up_and_the_part_kept(
    s3: str, behind: Path, tmp_path: Path
) -> None:
    """After some attempts it is unavailable, in words; the bytes so far stay."""
    with (
        running(static(behind, ranges=True, cut=lambda n: 3_000_000 if n == 1 else 0)) as url,
        pytest.raises(SourceUnavailable, match="broke off large 5 times"),
    ):
        quick(url).fetch("large", tmp_path / "part", len(LARGE), silent)
    kept = (tmp_path / "part").read_bytes()
    assert 3_000_000 - READ_BYTES < len(kept) <= 3_000_000
    assert LARGE.startswith(kept)


def test_a_wrong_beginning_costs_only_a_new_start(
    store: Store, other: Store, cache: Watched
) -> None:
    """A part that does not lead to the right bytes is thrown away, and the file got from the start."""
    found = add(store, "x", {"big": LARGE})
    push(store, [found.name], cache)
    (other.layout.downloads / f"{SHA256}.part").write_bytes(b"wrong beginning")
    with other.lease("t") as lease:
        assert Substituter(other, [cache], Trust({})).pull(found.name, lease)
    assert len(cache.fetched) == 2
    assert damage(other) == []


# --- refusals ----------------------------------------------------------------------------------


def error(code: str, more: str = "") -> bytes:
    """The body of an S3 error."""
    return f"<Error><Code>{code}</Code>{more}<Secret>{CANARY}</Secret></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, b"", Unauthorized, "rejects the credentials"),
        (403, error("InvalidAccessKeyId"), Unauthorized, "rejects the credentials"),
        (403, error("SignatureDoesNotMatch"), Unauthorized, "AWS_SECRET_ACCESS_KEY"),
        (400, error("ExpiredToken"), Unauthorized, "AWS_SESSION_TOKEN"),
        (403, error("RequestTimeTooSkewed"), Unauthorized, "clock"),
        (403, error("AccessDenied"), Gated, "s3:GetObject and s3:ListBucket"),
        (404, error("NoSuchBucket"), SourceMissing, "bucket bucket not found at http"),
        (301, error("PermanentRedirect"), SourceUnavailable, "another region"),
        (
            400,
            error("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
            SourceUnavailable,
            "add .region=eu-west-1 to its address",
        ),
        (429, b"", RateLimited, "asks to slow down"),
        (503, error("SlowDown"), RateLimited, "asks to slow down"),
        (500, error("InternalError"), SourceUnavailable, "answered 500"),
        (418, b"", SourceUnavailable, "answered 418"),
    ],
)
def test_refusals_are_told_apart(  # noqa: PLR0917
    s3: str, tmp_path: Path, status: int, body: bytes, kind: type[MmError], words: str
) -> None:
    """Each has its own words and remedy, whatever was asked; nothing else of the answer is said."""
    (tmp_path / "file").write_bytes(b"x")
    sha256 = hashlib.sha256(b"x").hexdigest()
    with running(static(tmp_path, ranges=True, refusing=Refusing(status, {}, body))) as url:
        cache = quick(url)
        asked = {
            "read": lambda: cache.read("x"),
            "fetch": lambda: cache.fetch("x", tmp_path / "part", 10, silent),
            "write": lambda: cache.write("x", b"1"),
            "put": lambda: cache.put("x", tmp_path / "file", sha256, silent),
        }
        if status != 404:
            asked["has"] = lambda: cache.has("x", 1)
        for name, ask in asked.items():
            with pytest.raises(MmError, match=words) as refused:
                ask()
            assert type(refused.value) is kind, name
            assert refused.value.remedy
            assert CANARY not in str(refused.value)


def test_only_what_is_not_there_is_a_miss(s3: str, cache: Watched, tmp_path: Path) -> None:
    """A missing file is None; a missing bucket is an error, for whoever pulls or pushes."""
    assert cache.read("x") is None
    assert cache.fetch("x", tmp_path / "part", 10, silent) is None
    assert not cache.has("x", 1)
    nowhere = quick(s3, name="no-such-bucket")
    with pytest.raises(SourceMissing, match="bucket no-such-bucket not found"):
        nowhere.read("x")
    with pytest.raises(SourceMissing, match="bucket no-such-bucket not found"):
        nowhere.write("x", b"1")


def test_nobody_at_the_endpoint(s3: str) -> None:
    """A closed port is said so, with what to look at."""
    with pytest.raises(SourceUnavailable, match="connection refused") as refused:
        quick("http://127.0.0.1:9").read("x")
    assert "AWS_ENDPOINT_URL" in refused.value.remedy


def test_without_credentials(s3: str, cache: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment, and no cloud that gives some: the remedy names the variables."""
    cache.write("x", b"public")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unauthorized, match="no credentials") as refused:
        quick(s3).read("x")
    assert "AWS_ACCESS_KEY_ID" in refused.value.remedy
    assert "AWS_SKIP_SIGNATURE" in refused.value.remedy


def test_a_public_bucket_needs_no_credentials(
    s3: str, behind: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told so, nobody is asked for some, and nothing is signed."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with running(static(behind, ranges=True)) as url:
        assert quick(url).fetch("large", tmp_path / "part", len(LARGE), silent) == SHA256


def test_settings_that_cannot_be(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of certificates that is none is refused with a message, before anything is asked."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(InvalidInput, match="AWS_CA_BUNDLE"):
        quick(s3)
    (tmp_path / "none.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    )
    with pytest.raises(InvalidInput, match="cannot be used"):
        quick(s3)


def test_a_bucket_that_is_down_costs_a_build_nothing_but_the_asking(
    s3: str, store: Store, tmp_path: Path
) -> None:
    """It is said once, and everything is built here."""
    said: list[str] = []
    shop = Shop()
    with running(static(tmp_path, ranges=True, refusing=Refusing(503, {}))) as url:
        substituter = Substituter(store, [quick(url)], Trust({}), report=said.append)
        realise(
            goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter
        )
    assert sorted(shop.ran) == ["model", "system", "weights"]
    assert len(said) == 1


def test_a_record_is_never_larger_than_records_are(cache: Watched) -> None:
    """A huge file where a record is looked for is not read."""
    cache.files.replace("objects/x", b"0" * ((16 << 20) + 1))
    with pytest.raises(SourceUnavailable, match="larger than any record"):
        cache.read("objects/x")
