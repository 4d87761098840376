"""Plans of the catalog's checkpoint deployments against described hosts, from headers of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.recipe import HubSource, IndexSource
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.described_host import described_hosts
from mmadmin.core.fit.estimate import Room, device_of
from mmadmin.core.fit.placement import Answer, Candidate, HostView, Refusal, place
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.questions import requests_of
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.host.fit import Look, look, wanted_of
from tests.host.test_hub_checkpoints import hub_of, medium
from tests.support.hub import local_hub

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
REPO = "mistralai/Mistral-Medium-3.5-128B"
HOSTS = described_hosts(DEPLOYMENTS / "hosts")
FP8, NVFP4, W4A16 = (f"mistral-medium-3.5-{name}" for name in ("fp8", "nvfp4", "w4a16-kv8"))
GIB = 1 << 30


def catalog(name: str, **lines: str) -> Spec:
    """A deployment of the catalog, with some lines written otherwise."""
    text = (DEPLOYMENTS / "catalog" / f"{name}.toml").read_text(encoding="utf-8")
    for old, new in lines.items():
        assert f"\n{old} =" in text
        text = "\n".join(new if row.startswith(f"{old} =") else row for row in text.split("\n"))
    return parse_spec(text)


@pytest.fixture(scope="module")
def looks() -> Iterator[dict[str, Look]]:
    """What the hub's headers say of each deployment."""
    with local_hub() as running:
        running.repo(REPO).commit(medium())
        yield {name: look(catalog(name), hub_of(running)) for name in (FP8, NVFP4, W4A16)}


def plan(seen: Look, spec: Spec, host: str) -> Answer:
    """Where the deployment can sit on a described host."""
    return place(wanted_of(spec, seen.header), [HostView(host, HOSTS[host])])


def candidate(found: Answer) -> Candidate:
    """The one way to place it."""
    assert not found.refusals, found.refusals[0].reason
    return found.candidates[0]


def refusal(found: Answer) -> Refusal:
    """Why there is none."""
    (one,) = found.refusals
    return one


def test_fp8_sits_on_four_h100(looks: dict[str, Look]) -> None:
    """31 GiB of weights each, 85 % of the GPU taken, no warning."""
    made = candidate(plan(looks[FP8], catalog(FP8), "h100x4"))
    assert made.devices == (0, 1, 2, 3)
    assert not made.warnings
    for parts in made.estimate.devices:
        assert parts["weights"] == pytest.approx(31 * GIB, rel=0.02)
        assert sum(parts.values()) == int(0.85 * 80 * GIB)


def test_nvfp4_is_weight_only_on_h100(looks: dict[str, Look]) -> None:
    """A warning that says what that means."""
    made = candidate(plan(looks[NVFP4], catalog(NVFP4), "h100x4"))
    assert [one.rule for one in made.warnings] == ["nvfp4-weight-only-below-blackwell"]
    assert made.estimate.devices[0]["weights"] < 23 * GIB


def test_w4a16_sits_on_two_h100_with_a_pool_in_fp8(looks: dict[str, Look]) -> None:
    """35 GiB each; with a cache in 16 bits the same pool holds half the tokens."""
    made = candidate(plan(looks[W4A16], catalog(W4A16), "h100x4"))
    assert len(made.devices) == 2
    assert made.estimate.devices[0]["weights"] == pytest.approx(35 * GIB, rel=0.05)
    shared = {"dtype": 'dtype = "auto"\nkv_cache_dtype = "bfloat16"'}
    spec, half = catalog(W4A16), catalog(W4A16, **shared)
    memory = wanted_of(spec, looks[W4A16].header).memory
    gpus = [device_of(gpu) for gpu in HOSTS["h100x4"].gpus[:2]]
    most = [
        memory.reach(looks[W4A16].header, one.serve, gpus, Room()).most_slots
        for one in (spec, half)
    ]
    assert most == [6, 3]


@pytest.mark.parametrize("host", ["h200", "a100"])
@pytest.mark.parametrize(("name", "gpus"), [(FP8, 4), (NVFP4, 4), (W4A16, 2)])
def test_one_gpu_is_not_what_the_file_asks_for(
    looks: dict[str, Look], name: str, gpus: int, host: str
) -> None:
    """The number of GPUs is in `[serve]`."""
    found = refusal(plan(looks[name], catalog(name), host))
    assert found.reason.startswith(f"the options want {gpus} GPUs of one kind")


def test_w4a16_on_one_gpu(looks: dict[str, Look]) -> None:
    """An H200 holds it alone; an A100 has no FP8 cache; in 16 bits a shorter context is named."""
    alone = {"tensor_parallel_size": "tensor_parallel_size = 1"}
    made = candidate(plan(looks[W4A16], catalog(W4A16, **alone), "h200"))
    assert made.devices == (0,)
    found = refusal(plan(looks[W4A16], catalog(W4A16, **alone), "a100"))
    assert "FP8 K/V cache needs compute capability 8.9" in found.reason
    assert "16 bits" in found.remedy
    wide = {**alone, "dtype": 'dtype = "auto"\nkv_cache_dtype = "bfloat16"'}
    found = refusal(plan(looks[W4A16], catalog(W4A16, **wide), "a100"))
    assert "K/V pool of 1 GPU holds" in found.reason


@pytest.mark.parametrize("name", [FP8, NVFP4, W4A16])
def test_v100_are_refused_with_what_works_instead(looks: dict[str, Look], name: str) -> None:
    """By rules, before anything is downloaded."""
    found = refusal(plan(looks[name], catalog(name), "v100x4"))
    assert "7.0" in found.reason
    assert "GGUF (Q4_K_M) with llama-server" in found.remedy
    rules = {one.rule for one in found.findings if one.severity == "refuse"}
    assert {"compressed-tensors-needs-sm80", "vllm-dropped-volta", "bfloat16-needs-sm80"} <= rules


def locked(spec: Spec) -> Lock:
    """A lock with one file of each list."""
    pins: dict[str, tuple[LockedFile, ...]] = {}
    interpreters = {}
    for request in requests_of(spec):
        if request.packages is not None:
            wheel = "demo-1.0-py3-none-any.whl"
            source = IndexSource("demo", "1.0", wheel)
            pins[request.name] = (LockedFile(wheel, "1" * 64, 9, source),)
            interpreters[request.name] = "cpython-3.11-linux-x86_64"
        elif request.origin is not None:
            names = ("config.json", "model.safetensors")
            pins[request.name] = tuple(
                LockedFile(name, "2" * 64, 9, HubSource(request.origin.repo, "c" * 40, name))
                for name in names
            )
    return Lock(pins, {}, interpreters)


def graph(name: str) -> list[Derivation]:
    """The steps of a deployment of the catalog on four H100."""
    spec = catalog(name)
    return topological(assemble(spec, locked(spec), HOSTS["h100x4"]))


@pytest.mark.parametrize("name", [FP8, NVFP4, W4A16])
def test_a_plan_names_every_step(name: str) -> None:
    """Two environments, the quantisation and its proof, the checked command, the system."""
    kinds = [step.recipe for step in graph(name)]
    assert sorted({kind for kind in kinds if kind != "fetch"}) == [
        *("python-env", "quantize-checkpoint", "system"),
        *("verify-checkpoint", "vllm-command", "vllm-options"),
    ]
    assert kinds.count("python-env") == 2
    assert kinds[-1] == "system"


def test_another_option_builds_its_command_only_again() -> None:
    """Environment and checkpoint stay as they are."""
    one, other = catalog(FP8), catalog(FP8, max_model_len="max_model_len = 16384")
    made = [
        {step.digest for step in topological(assemble(spec, locked(spec), HOSTS["h100x4"]))}
        for spec in (one, other)
    ]
    assert len(made[0] - made[1]) == 2, "vllm-command and system"


def test_images_with_tekken_are_refused_before_a_download(looks: dict[str, Look]) -> None:
    """The file that selects another tokenizer is named."""
    spec = catalog(FP8, leave_out="leave_out = []")
    header: Any = looks[FP8].header
    header = replace(header, files=header.files | {"tekken.json"})
    found = refusal(place(wanted_of(spec, header), [HostView("h100x4", HOSTS["h100x4"])]))
    assert "tekken.json" in found.reason


def test_a_source_in_fp8_must_be_converted_first() -> None:
    """From the headers alone."""
    with local_hub() as running:
        running.repo(REPO).commit(medium())
        with pytest.raises(InvalidSpec, match=r"model\.quantize: the source is quantised already"):
            look(catalog(FP8, dequantize="dequantize = false"), hub_of(running))
