"""verify-gguf: a report of a sound model, in a limited child; no object for any other."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mmadmin.core.canonical import parse
from mmadmin.core.errors import InvalidDerivation, InvalidModel
from mmadmin.core.formats.gguf.recipes.verify_gguf import RECIPE
from tests.core.formats.gguf.test_header import HOSTILE, gguf, text
from tests.support.models import TOKENS, make_model, make_shards
from tests.support.tools import attempt


def test_the_report_says_what_the_file_says(tmp_path: Path) -> None:
    """Counts, arrays, sizes, the template's hash; canonical, without floats."""
    model = tmp_path / "model"
    model.mkdir()
    (path,) = make_model(model / "m.gguf", template="{{ messages }}")
    out = attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=model)
    report = parse((out / "report.json").read_bytes())
    assert isinstance(report, dict)
    assert report["architecture"] == "llama"
    assert report["size_bytes"] == path.stat().st_size
    assert report["tensor_count"] == 6
    assert report["tensor_bytes"] == sum((5 + i) * 7 * 4 for i in range(6))
    assert report["tensor_types"] == {"F32": report["tensor_bytes"]}
    assert (report["layers"], report["context_length"], report["embedding_length"]) == (2, 128, 8)
    assert (report["head_count"], report["head_count_kv"], report["key_length"]) == (4, 2, None)
    assert report["vocab_size"] == len(TOKENS)
    arrays = report["arrays"]
    assert isinstance(arrays, dict)
    assert arrays["tokenizer.ggml.merges"] == 3
    metadata = report["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["llama.rope.freq_base"] == "10000.0"
    assert isinstance(report["template_sha256"], str)


def test_a_shard_means_its_whole_set(tmp_path: Path) -> None:
    """Sizes and tensors of all shards, metadata of the first."""
    paths = make_shards(tmp_path / "model")
    out = attempt(tmp_path / "work").build(
        RECIPE, {"file": "m-00002-of-00003.gguf"}, model=tmp_path / "model"
    )
    report = parse((out / "report.json").read_bytes())
    assert isinstance(report, dict)
    assert report["files"] == 3
    assert report["tensor_count"] == 6
    assert report["size_bytes"] == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("case", ["string of 8 GiB", "big-endian", "2^32-1 dimensions", "empty"])
def test_a_hostile_file_gives_no_object(case: str, tmp_path: Path) -> None:
    """What gguf-py opens without a word is refused here, through the real child."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/m.gguf").write_bytes(HOSTILE[case])
    work = attempt(tmp_path / "work")
    with pytest.raises(InvalidModel, match=r"m\.gguf"):
        work.build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")
    assert not list(work.out.iterdir())


def test_a_model_without_an_architecture_is_none(tmp_path: Path) -> None:
    """A valid container that no engine could load."""
    (tmp_path / "model").mkdir()
    data = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
    (tmp_path / "model/m.gguf").write_bytes(data)
    with pytest.raises(InvalidModel, match="no architecture"):
        attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("general.type", "adapter", "a LoRA adapter"),
        ("general.type", "imatrix", "an importance matrix"),
        ("general.architecture", "clip", "a multimodal projector"),
        ("general.architecture", "controlvector", "a control vector"),
    ],
)
def test_what_belongs_beside_a_model_is_refused(
    key: str, value: str, what: str, tmp_path: Path
) -> None:
    """An adapter, a matrix, a projector or a control vector is named, and gives no object."""
    values = {"general.architecture": "llama", key: value}
    (tmp_path / "model").mkdir()
    body = b"".join(text(k) + struct.pack("<I", 8) + text(v) for k, v in values.items())
    (tmp_path / "model/m.gguf").write_bytes(gguf(kvs=len(values), body=body))
    with pytest.raises(InvalidModel, match=rf"m\.gguf is {what}, not a model"):
        attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")


def test_a_vocabulary_without_tensors_is_refused(tmp_path: Path) -> None:
    """It names an architecture and holds nothing to load."""
    body = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/m.gguf").write_bytes(gguf(kvs=1, body=body))
    with pytest.raises(InvalidModel, match="no tensors"):
        attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")


def test_a_wrong_file_name_lists_what_is_there(tmp_path: Path) -> None:
    """The object's files are the remedy."""
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model/m.gguf")
    with pytest.raises(InvalidDerivation, match=r"no file x\.gguf.*m\.gguf"):
        attempt(tmp_path / "work").build(RECIPE, {"file": "x.gguf"}, model=tmp_path / "model")
    with pytest.raises(InvalidDerivation, match="lacks file"):
        RECIPE.check({})
