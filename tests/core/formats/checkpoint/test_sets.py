"""Which files are one checkpoint, and that its files belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmadmin.core.errors import InvalidModel, InvalidSpec, NotFound
from mmadmin.core.formats.checkpoint.model import find_model, read_model, read_template
from mmadmin.core.formats.checkpoint.sets import group, select
from mmadmin.core.formats.protocol import RepoFile
from tests.support.checkpoints import TEMPLATE, bf16, make_checkpoint, safetensors, tensors

REPO = [
    RepoFile(path, 10)
    for path in (
        *(".gitattributes", "LICENSE", "README.md", "SYSTEM_PROMPT.txt", "chat_template.jinja"),
        *("config.json", "consolidated-00001-of-00002.safetensors", "modeling_evil.py"),
        *("consolidated-00002-of-00002.safetensors", "consolidated.safetensors.index.json"),
        *("generation_config.json", "model-00001-of-00002.safetensors", "params.json"),
        *("model-00002-of-00002.safetensors", "model.safetensors.index.json", "tekken.json"),
        *("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
    )
]


def test_a_repository_with_two_layouts() -> None:
    """Transformers' layout is the model; Mistral's own is listed beside it and never chosen."""
    model, native = group(REPO)
    assert (model.name, model.kind, model.shards) == ("model", "model", 2)
    assert (native.name, native.kind) == ("consolidated", "native")
    assert [file.path for file in model.weights] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert set(model.beside) == {
        *("LICENSE", "chat_template.jinja", "config.json", "generation_config.json"),
        *("model.safetensors.index.json", "processor_config.json", "tekken.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert select(REPO, None) == model


def test_code_of_a_repository_is_left_out() -> None:
    """No Python file is part of a checkpoint."""
    assert not [f.path for one in group(REPO) for f in one.files if f.path.endswith(".py")]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "x/model.ckpt"])
def test_pickles_are_refused_by_name(name: str) -> None:
    """The file is named, with the reason."""
    with pytest.raises(InvalidModel, match="runs the code in it") as caught:
        select([RepoFile("config.json", 1), RepoFile(name, 9)], None)
    assert name in caught.value.message


def test_a_missing_shard_is_never_selected() -> None:
    """Its number is named."""
    with pytest.raises(InvalidModel, match="shard 2 of 2"):
        select([f for f in REPO if "model-00002" not in f.path], None)


def test_one_of_several_folders() -> None:
    """A folder or a set's name means one; nothing means none."""
    files = [RepoFile(f"{folder}/{f.path}", 10) for folder in ("fp8", "bf16") for f in REPO]
    assert select(files, "fp8").name == "fp8/model"
    assert select(files, "bf16/").quant == "bf16"
    assert select(files, "bf16/model-00001-of-00002.safetensors").name == "bf16/model"
    with pytest.raises(InvalidSpec) as caught:
        select(files, None)
    assert caught.value.details["candidates"] == ["bf16/model", "fp8/model"]
    with pytest.raises(NotFound, match="nvfp4"):
        select(files, "nvfp4")


def test_adapters_and_bare_weights_are_no_models() -> None:
    """Weights without a configuration beside them are named."""
    with pytest.raises(NotFound, match=r"unet\.safetensors"):
        select([RepoFile("unet.safetensors", 1)], None)
    (adapter,) = group([RepoFile("adapter_model.safetensors", 1)])
    assert adapter.kind == "adapter"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_sound_checkpoint_is_read(tmp_path: Path, shards: int) -> None:
    """Dimensions by the configuration, tensors by the headers, from any of its files."""
    folder = make_checkpoint(tmp_path / "m", shards=shards)
    shape = read_model(folder)
    assert (shape.architecture, shape.model_type) == (
        "Mistral3ForConditionalGeneration",
        "mistral3",
    )
    assert (shape.layers, shape.context_train, shape.config.numbers["kv_heads"]) == (2, 4096, 2)
    assert len(shape.weights) == len(tensors())
    assert shape.parameters * 2 == shape.weight_bytes
    assert shape.tower_bytes == 32 * 32 * 2
    assert read_model(folder / "config.json") == shape
    assert read_model(folder / find_model(folder).weights[-1].path) == shape


def damaged(folder: Path, change: str) -> None:
    """Spoil a sharded checkpoint."""
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    if change == "a shard is gone":
        second.unlink()
    elif change == "a tensor in two shards":
        second.write_bytes(safetensors(dict(list(tensors().items())[:1])))
    elif change == "another revision":
        second.write_bytes(safetensors({"lm_head.bias": bf16(4)}))
    elif change == "a foreign shard":
        told["weight_map"] = {k: v for k, v in told["weight_map"].items() if v != second.name}
        index.write_text(json.dumps(told))
    elif change == "no index":
        index.unlink()
    elif change == "a path in the index":
        told["weight_map"]["lm_head.weight"] = "../../etc/passwd"
        index.write_text(json.dumps(told))
    elif change == "a shard that is not there":
        told["weight_map"]["lm_head.weight"] = "model-00009-of-00009.safetensors"
        index.write_text(json.dumps(told))
    elif change == "a tensor in another shard":
        told["weight_map"]["lm_head.weight"] = second.name
        index.write_text(json.dumps(told))
    elif change == "an LFS pointer":
        first.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    else:
        raise AssertionError(change)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("a shard is gone", "shard 2 of 3"),
        ("a tensor in two shards", "is in model-00001-of-00003"),
        ("another revision", "of different revisions"),
        ("a foreign shard", "not part of this set"),
        ("no index", "index of its 3 shards is missing"),
        ("a path in the index", "outside its folder"),
        ("a shard that is not there", "model-00009-of-00009"),
        ("a tensor in another shard", "of different revisions"),
        ("an LFS pointer", "model-00001-of-00003"),
    ],
)
def test_a_set_that_does_not_belong_together_is_refused(
    tmp_path: Path, change: str, what: str
) -> None:
    """The file or tensor that is wrong is named."""
    folder = make_checkpoint(tmp_path / "m", shards=3)
    damaged(folder, change)
    with pytest.raises(InvalidModel, match=what):
        read_model(folder)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "not a table"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "no architecture"),
        ('{"model_type": "llama"}', "has 0 layers"),
        ('{"model_type": "llama", "num_hidden_layers": 999999999}', "999999999 layers"),
    ],
)
def test_a_hostile_configuration_is_refused(tmp_path: Path, text: str, what: str) -> None:
    """Whatever `config.json` holds, it is the model that is not valid."""
    folder = make_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(InvalidModel, match=what):
        read_model(folder)


def test_the_template_file_comes_first(tmp_path: Path) -> None:
    """`chat_template.jinja` is taken before the one of the tokenizer's configuration."""
    folder = make_checkpoint(tmp_path / "m")

    def own() -> str | None:
        return read_template(find_model(folder), lambda file: (folder / file.path).open("rb"))

    assert own() == TEMPLATE
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, 7]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert own() == "d"
    (folder / "chat_template.jinja").write_text("first")
    assert own() == "first"
