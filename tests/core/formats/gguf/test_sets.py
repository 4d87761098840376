"""Selecting one model out of a repository's files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.errors import InvalidModel, InvalidSpec, NotFound
from mmadmin.core.formats.gguf.sets import GgufSet, group, select, sibling, tokens_of
from mmadmin.core.formats.protocol import RepoFile


def listing(*paths: str) -> list[RepoFile]:
    """A repository of these paths, with sizes and digests."""
    return [RepoFile(path, 1000 + i, f"{i:064x}") for i, path in enumerate(paths)]


MIXED = listing(
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf",
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf",
    *(f"UD-Q4_K_XL/m-UD-Q4_K_XL-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)),
    "m-Q8_0.gguf",
    "m-I-Q8_0.gguf",
    "mmproj-F16.gguf",
    "mmproj-BF16.gguf",
    "mtp-Q8_0.gguf",
    "imatrix.dat",
    "README.md",
)


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("Q4_K_M", "Q4_K_M/m-Q4_K_M"),
        ("q4_k_m", "Q4_K_M/m-Q4_K_M"),
        ("UD-Q4_K_XL", "UD-Q4_K_XL/m-UD-Q4_K_XL"),
        ("ud-q4_k_xl", "UD-Q4_K_XL/m-UD-Q4_K_XL"),
        ("Q8_0", "m-Q8_0"),
        ("q8_0", "m-Q8_0"),
        ("I-Q8_0", "m-I-Q8_0"),
        ("m-Q8_0", "m-Q8_0"),
        ("m-I-Q8_0.gguf", "m-I-Q8_0"),
        ("Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "Q4_K_M/m-Q4_K_M"),
        ("UD-Q4_K_XL/", "UD-Q4_K_XL/m-UD-Q4_K_XL"),
    ],
)
def test_a_selector_means_one_set(selector: str, name: str) -> None:
    """Quants, token runs, folders and file names each lead to their one set."""
    assert select(MIXED, selector).name == name


@pytest.mark.parametrize("selector", ["Q4_K_XL", "Q4_K", "F16", "BF16", "K_M", "8_0", "imatrix"])
def test_a_part_of_a_token_matches_nothing(selector: str) -> None:
    """Partial tokens, another recipe's quant and projectors' types are refused with candidates."""
    with pytest.raises(NotFound) as caught:
        select(MIXED, selector)
    assert caught.value.details["candidates"] == ["Q8_0", "I-Q8_0", "Q4_K_M", "UD-Q4_K_XL"]
    assert "UD-Q4_K_XL" in caught.value.remedy


@pytest.mark.parametrize("selector", [None, "", "m"])
def test_several_matches_are_listed(selector: str | None) -> None:
    """Naming nothing, or a token that all share, lists what there is."""
    with pytest.raises(InvalidSpec) as caught:
        select(MIXED, selector)
    assert len(caught.value.details["candidates"]) == 4
    assert caught.value.details["field"] == "model.quant"


def test_no_selector_takes_the_only_model() -> None:
    """A repository with one model needs no selector, whatever lies beside it."""
    files = listing("mmproj-F16.gguf", "only.Q5_K_S.gguf", "imatrix_unsloth.gguf", "mtp-q8_0.gguf")
    assert select(files, None).name == "only.Q5_K_S"


def test_kinds_are_told_apart() -> None:
    """Projectors, draft heads, importance matrices, vocabularies and adapters are no models."""
    kinds = {
        s.name: s.kind
        for s in group(
            listing(
                "a/model-Q4_0.gguf",
                "a/mmproj-model-f16.gguf",
                "model.mmproj-Q8_0.gguf",
                "mtp-Q8_0.gguf",
                "model-mtp-Q8_0.gguf",
                "Model-MTP-Q8_0.gguf",
                "imatrix_unsloth.gguf",
                "m.imatrix.gguf",
                "ggml-vocab-llama-bpe.gguf",
                "m-lora-f16.gguf",
            )
        )
    }
    assert kinds == {
        "a/model-Q4_0": "model",
        "a/mmproj-model-f16": "mmproj",
        "model.mmproj-Q8_0": "mmproj",
        "mtp-Q8_0": "draft",
        "model-mtp-Q8_0": "draft",
        "Model-MTP-Q8_0": "model",
        "imatrix_unsloth": "imatrix",
        "m.imatrix": "imatrix",
        "ggml-vocab-llama-bpe": "vocab",
        "m-lora-f16": "adapter",
    }


ODD = (
    "SmolLM2-lora-merged-Q4_1.gguf",
    "X-imatrix-Q4_K_M.gguf",
    "qwen-0.5b-draft-Q8_0.gguf",
    "my-mmproj-tuned-Q4_1.gguf",
    "eagle3-Q4_1.gguf",
)
"""Names of models that hold a word for something else."""


@pytest.mark.parametrize("path", ODD)
@pytest.mark.parametrize("beside", [(), ("m-Q6_K.gguf", "mmproj-F16.gguf")])
def test_a_file_that_is_named_is_taken(path: str, beside: tuple[str, ...]) -> None:
    """Whatever words its name holds: its header decides what it is."""
    assert select(listing(path, *beside), path).files[0].path == path


@pytest.mark.parametrize("path", ODD)
def test_a_word_does_not_hide_the_only_model(path: str) -> None:
    """Where nothing else is a model, an odd name is offered, by its quant too."""
    files = listing(path, "mmproj-F16.gguf", "imatrix.gguf")
    assert [one.name for one in group(files) if one.kind == "model"] == [path[: -len(".gguf")]]
    quant = group(files)[0].quant
    assert quant
    assert select(files, quant).files[0].path == path
    assert select(files, None).files[0].path == path


def test_shards_are_one_set_with_its_size() -> None:
    """All shards together are a set, in order, with the bytes of all."""
    found = select(MIXED, "UD-Q4_K_XL")
    assert [f.path[-19:-5] for f in found.files] == [f"0000{i}-of-00004" for i in (1, 2, 3, 4)]
    assert found.size_bytes == sum(f.size_bytes for f in found.files)
    assert found.complete


def test_a_missing_shard_is_named_before_any_download() -> None:
    """A set that lacks a shard is shown as incomplete and refused with the number."""
    files = listing("m-Q4_K_M-00001-of-00003.gguf", "m-Q4_K_M-00003-of-00003.gguf")
    assert group(files)[0].missing == (2,)
    with pytest.raises(InvalidModel, match="shard 2 of 3"):
        select(files, "Q4_K_M")


def test_names_that_only_look_like_shards() -> None:
    """`of` in a name, number 0 and a number above the count do not make a shard; 1 of 1 does."""
    files = listing(
        "best-of-breed.gguf",
        "z-00000-of-00002.gguf",
        "z-00003-of-00002.gguf",
        "one-00001-of-00001.gguf",
    )
    assert {(s.name, s.shards, s.complete) for s in group(files)} == {
        ("best-of-breed", 1, True),
        ("z-00000-of-00002", 1, True),
        ("z-00003-of-00002", 1, True),
        ("one", 1, True),
    }


def test_a_folder_does_not_speak_for_a_file_that_says_otherwise() -> None:
    """The quant in the file's name wins over the folder's."""
    files = listing("Q4_K_M/m-UD-Q4_K_XL.gguf", "Q8_0/model.gguf")
    with pytest.raises(NotFound):
        select(files, "Q4_K_M")
    assert select(files, "Q4_K_M/").quant == "UD-Q4_K_XL"
    assert select(files, "q8_0").name == "Q8_0/model"


def test_the_same_quant_twice_is_ambiguous_until_the_name_is_given() -> None:
    """Two models of one quant need more tokens, or a path."""
    files = listing("a-7B-Q4_K_M.gguf", "a-13B-Q4_K_M.gguf")
    with pytest.raises(InvalidSpec):
        select(files, "Q4_K_M")
    assert select(files, "13b-q4_k_m").name == "a-13B-Q4_K_M"


def test_quant_labels() -> None:
    """Labels keep the repository's spelling, prefix included; glued quants are found."""
    labels = {
        path: group(listing(path))[0].quant
        for path in (
            "m.Q4_K_M.gguf",
            "m.i1-IQ2_XXS.gguf",
            "m_q4_0.gguf",
            "BF16/m-BF16-00001-of-00009.gguf",
            "gpt-MXFP4_MOE.gguf",
            "TQ1_0/m.gguf",
            "plain.gguf",
            "x-F32.gguf",
        )
    }
    assert list(labels.values()) == [
        "Q4_K_M",
        "i1-IQ2_XXS",
        "q4_0",
        "BF16",
        "MXFP4_MOE",
        "TQ1_0",
        None,
        "F32",
    ]


def test_the_projector_is_found_near_the_model() -> None:
    """A projector in the model's folder is preferred; none is None."""
    files = listing("a/m-Q4_0.gguf", "a/mmproj-F32.gguf", "b/m-Q8_0.gguf", "b/mmproj-F16.gguf")
    model = select(files, "Q4_0")
    projector = sibling(files, model, "mmproj")
    assert projector is not None
    assert projector.name == "a/mmproj-F32"
    assert sibling(files, model, "draft") is None


QUANTS = ["Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL", "Q4_K_XL", "IQ4_XS", "BF16", "I-Q8_0", "Q6_K"]


@given(
    st.sets(st.sampled_from(QUANTS), min_size=1),
    st.sampled_from(QUANTS),
    st.sampled_from(["{0}/m-{0}.gguf", "m-{0}.gguf", "m.{0}.gguf"]),
)
def test_a_quant_selects_itself_or_nothing(present: set[str], wanted: str, form: str) -> None:
    """Whatever a repository holds, a quant selects the set of that name or raises."""
    files = listing(*(form.format(q) for q in sorted(present)))
    if wanted in present:
        assert select(files, wanted.lower()).quant == wanted
    else:
        with pytest.raises(NotFound):
            select(files, wanted)


@given(st.text(max_size=40))
def test_any_selector_ends_in_a_set_or_an_expected_error(selector: str) -> None:
    """No text that a person can type breaks the selector."""
    try:
        found = select(MIXED, selector)
    except (NotFound, InvalidSpec):
        return
    assert isinstance(found, GgufSet)
    assert tokens_of(selector) or selector.strip("/ ")
