"""Hosts from descriptions, and what they can serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.fit.described_host import described_host, described_hosts, parse_host
from mmadmin.core.fit.facts import host_facts_from_json
from mmadmin.core.fit.placement import HostView, place
from tests.core.fit.wanted import wanted_for
from tests.core.formats.gguf.tables import mistral_medium

HOSTS = Path(__file__).parents[3] / "deployments" / "hosts"
GIB = 1024**3
GPU_TOML = 'name = "x"\ncpus = 1\nmemory_gib = 8\n[[gpus]]\nname = "V"\n'
RUN: dict[str, Json] = {"context": 65536, "gpu_layers": 99, "tensor_split": ["8"] * 4}


def test_the_shipped_descriptions_are_hosts() -> None:
    """Seven hosts, each with the architectures that its name says; they survive JSON."""
    hosts = described_hosts(HOSTS)
    assert {name: facts.cuda_architectures for name, facts in hosts.items()} == {
        "a100": (80,),
        "cpu": (),
        "h100x4": (90,),
        "h200": (90,),
        "l40s": (89,),
        "t4": (75,),
        "v100x4": (70,),
    }
    for facts in hosts.values():
        assert host_facts_from_json(facts.as_json()) == facts


def test_the_first_deployment_on_described_v100s() -> None:
    """Q4_K_M fits four V100s at 23 to 25 GB a card, within 1.5 GiB."""
    wanted = wanted_for(mistral_medium("Q4_K_M"), **RUN)
    found = place(wanted, [HostView("v100x4", described_host(HOSTS, "v100x4"))]).best()
    assert found.devices == (0, 1, 2, 3)
    assert not found.warnings
    for used in found.estimate.per_device:
        assert 21.5 * GIB <= used <= 26.5 * GIB


def test_bf16_is_refused_on_described_v100s() -> None:
    """The original does not fit: 248 GB of weights for 128 GB of cards."""
    wanted = wanted_for(mistral_medium("BF16"), **RUN)
    answer = place(wanted, [HostView("v100x4", described_host(HOSTS, "v100x4"))])
    assert not answer.candidates
    assert "GPU 0 needs" in answer.refusals[0].reason


def test_one_h200_takes_it_whole() -> None:
    """Without a split the 128B model fits on one H200, and on no smaller single GPU."""
    hosts = [HostView(name, facts) for name, facts in described_hosts(HOSTS).items()]
    answer = place(wanted_for(mistral_medium("Q4_K_M"), context=65536), hosts)
    assert {c.host: len(c.devices) for c in answer.candidates} == {
        "h200": 1,
        "h100x4": 2,
        "v100x4": 4,
    }
    assert {r.host for r in answer.refusals} == {"a100", "cpu", "l40s", "t4"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not TOML"),
        ('name = "x"\ncpus = 1\n', "memory_gib"),
        ('name = "x"\ncpus = 1\nmemory_gib = 8\nram = 3\n', "ram is not a field"),
        (
            GPU_TOML + 'memory_gib = 8\ncompute_capability = "seven"\n',
            r"gpus\[0\].compute_capability",
        ),
        (
            GPU_TOML + "memory = 8\n",
            r"gpus\[0\].memory is not",
        ),
        ("cpus = 1\nmemory_gib = 8\n", "name is missing"),
    ],
)
def test_a_bad_description_names_the_field(text: str, message: str) -> None:
    """Every refusal says which field, and what to write."""
    with pytest.raises(InvalidInput, match=message) as caught:
        parse_host(text)
    assert caught.value.remedy


def test_an_unknown_host_lists_the_known_ones(tmp_path: Path) -> None:
    """A name that is not described is answered with those that are."""
    with pytest.raises(NotFound) as caught:
        described_host(HOSTS, "v200")
    assert "v100x4" in caught.value.remedy
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text('name = "same"\ncpus = 1\nmemory_gib = 1\n')
    with pytest.raises(InvalidInput, match=r"b\.toml: there is another host named same"):
        described_hosts(tmp_path)
