"""Looking at a hub repository without downloading it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from mmadmin.core.engines.llama_server.memory import predict
from mmadmin.core.errors import (
    Gated,
    InvalidModel,
    InvalidSpec,
    NotFound,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.core.fit.estimate import Device
from mmadmin.core.formats.gguf.header import read_stream
from mmadmin.core.formats.gguf.sets import select
from mmadmin.core.formats.gguf.shape import Weight
from mmadmin.host.hub import Hub
from mmadmin.host.hub_browser import browse, read_header
from mmadmin.host.policy import Policy
from tests.core.formats.gguf.tables import mistral_medium
from tests.support.hub import Hollow, LocalHub, instead, local_hub, status
from tests.support.llama import run_shape
from tests.support.models import LFS_POINTER

TOKEN = "hf_canary_b4d5"
MIB = 1 << 20
VOCABULARY = 131072
MERGES = 269_443
SMALL_VOCABULARY = 16384


@pytest.fixture
def local() -> Iterator[LocalHub]:
    """A running hub."""
    with local_hub() as running:
        yield running


def quick(local: LocalHub, token: str | None = None) -> Hub:
    """A hub that does not wait long."""
    return Hub(local.url, token, Policy(backoff_s=0.01, attempts=2))


def header(
    path: Path, weights: list[Weight], *, vocabulary: int, split: tuple[int, int, int]
) -> Hollow:
    """The header of a file with these tensors, and the size that the file would have."""
    writer = GGUFWriter(path, "mistral3")
    number, count, total = split
    if vocabulary:
        writer.add_block_count(88)
        writer.add_context_length(262144)
        writer.add_embedding_length(12288)
        writer.add_feed_forward_length(28672)
        writer.add_head_count(96)
        writer.add_head_count_kv(8)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"token-{i}" for i in range(vocabulary)])
        writer.add_token_types([1] * vocabulary)
        writer.add_token_merges([f"tok en{i:06}" for i in range(MERGES * vocabulary // VOCABULARY)])
    if count > 1:
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
    for weight in weights:
        kind = GGMLQuantizationType[weight.type]
        writer.add_tensor_info(
            weight.name, tuple(reversed(weight.shape)), None, weight.size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    data = path.read_bytes()
    padding = -len(data) % 32
    return Hollow(
        data + bytes(padding), len(data) + padding + sum(-(-w.size // 32) * 32 for w in weights)
    )


@pytest.fixture(scope="session")
def big_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hollow]:
    """The 128B model in Q4_K_M: as three shards, the first with metadata only, and as one file."""
    folder = tmp_path_factory.mktemp("headers")
    weights = list(mistral_medium("Q4_K_M").weights)
    half = len(weights) * 2 // 3
    parts = [[], weights[:half], weights[half:]]
    files = {
        f"Q4_K_M/m-Q4_K_M-0000{i + 1}-of-00003.gguf": header(
            folder / f"{i}.gguf", part, vocabulary=VOCABULARY * (i == 0), split=(i, 3, len(weights))
        )
        for i, part in enumerate(parts)
    }
    files["m-Q5_K_M.gguf"] = header(
        folder / "whole.gguf",
        list(mistral_medium("Q5_K_M").weights),
        vocabulary=SMALL_VOCABULARY,
        split=(0, 1, 0),
    )
    return files


def test_a_70_gb_set_costs_a_few_requests(local: LocalHub, big_files: dict[str, Hollow]) -> None:
    """Listing, dimensions and the tensor table of 70 GB: under 8 MB and 12 requests."""
    local.repo("team/m-GGUF").commit(dict(big_files))
    listing = browse(quick(local), "team/m-GGUF")
    chosen = select(listing.files, "Q4_K_M")
    assert chosen.size_bytes > 70e9
    glimpse = read_header(quick(local), listing.repo, listing.commit, chosen)
    assert local.sent <= 8_000_000
    assert len(local.seen) <= 12
    assert glimpse.bytes_read <= 8_000_000
    known = mistral_medium("Q4_K_M")
    assert glimpse.header.weight_bytes == known.weight_bytes
    assert glimpse.header.layers == 88
    card = Device(90, 140 << 30, 139 << 30)
    run = run_shape(context=65536)
    assert predict(glimpse.header, run, [card]).per_device == predict(known, run, [card]).per_device


def test_a_single_70_gb_file_is_read_through_its_vocabulary(
    local: LocalHub, big_files: dict[str, Hollow]
) -> None:
    """The table follows the vocabulary: nothing but the header is fetched, with few requests."""
    local.repo("team/m-GGUF").commit(dict(big_files))
    listing = browse(quick(local), "team/m-GGUF")
    chosen = select(listing.files, "Q5_K_M")
    glimpse = read_header(quick(local), listing.repo, listing.commit, chosen)
    head = big_files["m-Q5_K_M.gguf"].head
    assert len(head) <= local.sent <= len(head) + MIB
    assert len(local.seen) <= 12
    assert glimpse.header.weight_bytes == mistral_medium("Q5_K_M").weight_bytes
    assert glimpse.header.vocabulary == SMALL_VOCABULARY


def test_shards_that_all_hold_tensors(local: LocalHub, tmp_path: Path) -> None:
    """When the other shards do not hold every tensor, the first one's table is read too."""
    weights = list(mistral_medium("Q6_K").weights)
    parts = [weights[:300], weights[300:]]
    files = {
        f"m-Q6_K-0000{i + 1}-of-00002.gguf": header(
            tmp_path / f"{i}.gguf",
            part,
            vocabulary=SMALL_VOCABULARY * (i == 0),
            split=(i, 2, len(weights)),
        )
        for i, part in enumerate(parts)
    }
    local.repo("team/m-GGUF").commit(files)
    listing = browse(quick(local), "team/m-GGUF")
    glimpse = read_header(quick(local), listing.repo, listing.commit, select(listing.files, None))
    assert glimpse.header.weight_bytes == mistral_medium("Q6_K").weight_bytes


def test_a_listing_has_sets_licence_and_notes(local: LocalHub) -> None:
    """Shards are grouped, kinds told apart, the licence is recorded, a missing shard is noted."""
    blob = b"GGUF" + bytes(2000)
    local.repo("team/m-GGUF").commit(
        {
            "m-Q8_0.gguf": blob,
            "mmproj-F16.gguf": blob,
            "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": blob,
            "README.md": b"hello",
        }
    )
    listing = browse(quick(local), "team/m-GGUF")
    assert listing.licence == "apache-2.0"
    assert {one.label: (one.kind, one.complete) for one in listing.sets} == {
        "Q8_0": ("model", True),
        "Q4_K_M": ("model", False),
        "F16": ("mmproj", True),
    }
    assert listing.other_files == 1
    assert listing.notes == ("Q4_K_M: shard 2 of 2 is missing",)
    assert listing.as_json()["commit"] == listing.commit
    with pytest.raises(InvalidModel):
        select(listing.files, "Q4_K_M")


def test_selectors_on_a_listing_of_everything(local: LocalHub) -> None:
    """Two quants in folders, two loose ones, projectors, a draft head, an importance matrix."""
    blob = b"GGUF" + bytes(2000)
    paths = [
        *(f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)),
        *(f"UD-Q4_K_XL/m-UD-Q4_K_XL-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)),
        *("m-Q8_0.gguf", "m-I-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"),
        *("mtp-Q8_0.gguf", "imatrix.dat"),
    ]
    local.repo("team/m-GGUF").commit(dict.fromkeys(paths, blob))
    listing = browse(quick(local), "team/m-GGUF")
    assert [s.label for s in listing.sets if s.kind == "model"] == [
        "I-Q8_0",
        "Q8_0",
        "Q4_K_M",
        "UD-Q4_K_XL",
    ]
    assert select(listing.files, "UD-Q4_K_XL").shards == 4
    assert select(listing.files, "q8_0").files[0].path == "m-Q8_0.gguf"
    assert select(listing.files, "q8_0").files[0].sha256 == hashlib.sha256(blob).hexdigest()
    for selector in ("Q4_K_XL", "F16"):
        with pytest.raises(NotFound, match="UD-Q4_K_XL"):
            select(listing.files, selector)
    with pytest.raises(InvalidSpec) as caught:
        select(listing.files, None)
    assert len(caught.value.details["candidates"]) == 4


def test_a_repository_without_a_model_says_what_it_has(local: LocalHub) -> None:
    """Weights without a configuration and pickles are named with their kind."""
    local.repo("team/m").commit({"unet.safetensors": bytes(3000), "pytorch_model.bin": b"x"})
    (note,) = browse(quick(local), "team/m").notes
    assert "unet.safetensors (weights)" in note
    assert "pytorch_model.bin (pickle)" in note


def test_missing_private_and_gated_are_told_apart(local: LocalHub) -> None:
    """Three refusals, three remedies; the token is in none of them."""
    local.repo("team/private", token="another").commit({"a.gguf": b"GGUF"})
    local.repo("team/gated", gated=True).commit({"a.gguf": b"GGUF"})
    with pytest.raises(Unauthorized, match="no such repository, or it is private"):
        browse(quick(local), "team/none")
    with pytest.raises(SourceMissing) as caught:
        browse(quick(local, TOKEN), "team/private")
    assert TOKEN not in str(caught.value)
    with pytest.raises(Gated, match="gated"):
        browse(quick(local), "team/gated")


def test_a_renamed_repository_is_followed_and_noted(local: LocalHub) -> None:
    """The hub redirects an old name: the listing has the new one and says to write it."""
    local.repo("team/new").commit({"a-Q8_0.gguf": b"GGUF" + bytes(2000)})

    def moved(handler: object) -> bool:
        handler.send_response(307)  # type: ignore[attr-defined]
        handler.send_header("Location", "/api/models/team/new/revision/main")  # type: ignore[attr-defined]
        handler.send_header("Content-Length", "0")  # type: ignore[attr-defined]
        handler.end_headers()  # type: ignore[attr-defined]
        return True

    local.fail("models/team/old", moved)
    listing = browse(quick(local), "team/old")
    assert (listing.asked, listing.repo) == ("team/old", "team/new")
    assert "renamed" in listing.notes[0]


def test_the_token_is_sent_to_the_hub_alone(local: LocalHub, big_files: dict[str, Hollow]) -> None:
    """Ranges come from another host name by a signed address, without the token."""
    local.repo("team/m-GGUF", token=TOKEN).commit(dict(big_files))
    hub = quick(local, TOKEN)
    listing = browse(hub, "team/m-GGUF")
    read_header(hub, listing.repo, listing.commit, select(listing.files, "Q4_K_M"))
    assert local.requests("/cdn/")
    for seen in local.requests("/cdn/"):
        assert TOKEN not in str(seen.headers)
        assert seen.host.startswith("localhost")


def test_pointers_pages_and_broken_answers_are_explained(local: LocalHub) -> None:
    """What is not a GGUF is named; a bad status and a short answer are expected errors."""
    local.repo("team/m", lfs_from=10**9).commit(
        {"m-Q8_0.gguf": LFS_POINTER.encode(), "m-Q4_0.gguf": b"GGUF" + bytes(3000)}
    )
    listing = browse(quick(local), "team/m")
    with pytest.raises(InvalidModel, match="Git-LFS pointer"):
        read_header(quick(local), "team/m", listing.commit, select(listing.files, "q8_0"))
    small = select(listing.files, "q4_0")
    local.fail("m-Q4_0.gguf", status(403, "GatedRepo"))
    with pytest.raises(Gated):
        read_header(quick(local), "team/m", listing.commit, small)
    local.fail("m-Q4_0.gguf", instead(b"<!doctype html>sign in"))
    with pytest.raises(SourceUnavailable, match="ended early"):
        read_header(quick(local), "team/m", listing.commit, small)


def test_the_headers_used_here_are_valid(big_files: dict[str, Hollow]) -> None:
    """The made-up files pass the strict reader as whole files."""
    import io

    for name, hollow in big_files.items():
        found = read_stream(io.BytesIO(hollow.head), hollow.size, name)
        assert found.header_size == len(hollow.head)
