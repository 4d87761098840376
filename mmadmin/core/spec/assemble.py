"""Spec + lock + host facts → the goal derivation: the system that a generation runs.

    fetch ─ unpack ─ [merge] ─ [quantize-gguf] ─┬─ verify-gguf ─────────────┐
    fetch ─ unpack ─ build-engine ──────────────┼───────────────────────────┼─ system
    [extract-template ─ patch-template] ────────┴───────────────────────────┘

Only facts that change bytes enter: compiler, CUDA version and architectures, the CPU's
instruction sets for a native build. Nothing of paths, host names or thread counts does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import DoesNotFit, InvalidInput, ToolMissing
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock, LockedFile, file_as_json
from mmadmin.core.spec.spec import Spec

OLDEST_FOR_CUDA_13 = 75
"""CUDA 13 dropped every architecture before Turing."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def assemble(spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
    """The system's derivation, with everything that it is built from.

    Raises `DoesNotFit` or `ToolMissing` when this host cannot build the engine.
    """
    engine = _engine(spec, lock, facts)
    whole, whole_file = _model(spec, lock, engine)
    model, model_file = whole, whole_file
    if spec.model.quantize:
        model_file = f"{_stem(whole_file)}-{spec.model.quantize}.gguf"
        params: dict[str, Json] = {
            "file": whole_file,
            "type": spec.model.quantize,
            "output": model_file,
        }
        inputs = {"model": whole, "engine": engine}
        model = step("quantize-gguf", _stem(model_file), params, inputs)
    report = step("verify-gguf", _stem(model_file), {"file": model_file}, {"model": model})
    parts: dict[str, Derivation] = {"engine": engine, "model": model, "report": report}
    template = _template(spec, lock, whole, whole_file)
    if template is not None:
        parts["template"] = template
    mmproj_file = None
    projector = fetched_projector(spec, lock)
    if projector is not None:
        parts["mmproj"], mmproj_file = projector
    manifest: dict[str, Json] = {
        "engine_kind": spec.engine.kind,
        "alias": spec.public_name,
        "model_file": model_file,
        "template_file": "chat_template.jinja" if template is not None else None,
        "mmproj_file": mmproj_file,
        "options": dict(spec.tables["serve"]),
    }
    return step("system", spec.name, manifest, parts)


def step(
    kind: str, name: str, params: Mapping[str, Json], inputs: Mapping[str, Derivation]
) -> Derivation:
    """A derivation by the recipe of that kind, its params checked."""
    recipe = catalog.recipe(kind)
    recipe.check(params)
    return Derivation(slug(name), kind, recipe.version, params, inputs)


def slug(text: str) -> str:
    """A text as a derivation's name."""
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).lstrip(".+=-")[:100]
    return name or "unnamed"


def _stem(file: str) -> str:
    """A model file's name without folder, ending and shard suffix."""
    name = PurePosixPath(file).name
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name.removesuffix(".gguf")


def _fetch(name: str, files: Sequence[LockedFile]) -> Derivation:
    params: dict[str, Json] = {"files": [file_as_json(file) for file in files]}
    return step("fetch", name, params, {})


def _engine(spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
    wanted = spec.engine
    engine = catalog.engine(wanted.kind)
    backend = _backend(spec, facts)
    release = _release(lock.engine.path)
    archive = _fetch(PurePosixPath(lock.engine.path).name, [lock.engine])
    if wanted.prebuilt:
        ready: dict[str, Json] = {
            "subtree": wanted.subtree,
            "arch": f"{facts.arch}-{facts.os}",
            "backend": backend,
            "targets": [PurePosixPath(engine.binary).name],
            "licences": list(wanted.licences),
        }
        return step("engine-prebuilt", f"{wanted.kind}-{release}", ready, {"archive": archive})
    architectures = list(wanted.cuda_architectures or facts.cuda_architectures)
    if not facts.compiler:
        raise ToolMissing(
            "this host has no C++ compiler to build the engine with",
            remedy="install one: apt-get install g++",
        )
    if backend == "cuda":
        _check_cuda(architectures, facts)
    unpacked: dict[str, Json] = {"subtree": wanted.subtree, "members": []}
    source = step("unpack", f"{release}-source", unpacked, {"archive": archive})
    targets: list[Json] = [*sorted(architectures)] if backend == "cuda" else []
    params: dict[str, Json] = {
        "backend": backend,
        "cuda_architectures": targets,
        "native": wanted.native,
        "defines": {key: _define(value) for key, value in wanted.defines.items()},
        "targets": list(engine.targets),
        "arch": f"{facts.arch}-{facts.os}",
        "compiler": facts.compiler,
        "cuda": facts.cuda if backend == "cuda" else "",
        "cpu": facts.cpu_identity if wanted.native else "",
    }
    return step("build-engine", f"{wanted.kind}-{release}", params, {"source": source})


def _release(path: str) -> str:
    name = PurePosixPath(path).name
    return re.sub(r"\.(tar\.\w+|tgz|zip|whl)$", "", name)


def _define(value: Json) -> str:
    """A CMake value: booleans as CMake writes them."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)


def _backend(spec: Spec, facts: HostFacts) -> str:
    if spec.engine.backend != "auto":
        return spec.engine.backend
    return "cuda" if facts.gpus and facts.cuda else "cpu"


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
    if not lock.model:
        raise InvalidInput("the lock names no model file", remedy="make the lock again")
    if spec.model.source == "index":
        archive = _fetch(PurePosixPath(lock.model[0].path).name, lock.model)
        file = PurePosixPath(spec.model.file).name
        params: dict[str, Json] = {"subtree": "", "members": [spec.model.file]}
        return step("unpack", _stem(file), params, {"archive": archive}), file
    first = min(file.path for file in lock.model)
    return _fetch(_stem(first), lock.model), first


def _model(spec: Spec, lock: Lock, engine: Derivation) -> tuple[Derivation, str]:
    """The model before quantization, and its file's path inside the object."""
    fetched, first = fetched_model(spec, lock)
    if len(lock.model) == 1 or not spec.model.merge:
        return fetched, first
    if spec.engine.prebuilt:
        refuse(
            "model.merge",
            "a prebuilt engine has no tool to merge shards with",
            remedy="set merge = false: the engine loads the shards themselves",
        )
    merged = f"{_stem(first)}.gguf"
    inputs = {"shards": fetched, "engine": engine}
    return step("merge", _stem(first), {"first": first, "output": merged}, inputs), merged


def fetched_projector(spec: Spec, lock: Lock) -> tuple[Derivation, str] | None:
    """The projector as it is published, and its file's path inside the object; None = none."""
    if not spec.model.mmproj:
        return None
    file = PurePosixPath(spec.model.mmproj).name
    if spec.model.source == "index":
        archive = _fetch(PurePosixPath(lock.model[0].path).name, lock.model)
        params: dict[str, Json] = {"subtree": "", "members": [spec.model.mmproj]}
        return step("unpack", _stem(file), params, {"archive": archive}), file
    return _fetch(_stem(file), lock.mmproj), lock.mmproj[0].path


def _template(spec: Spec, lock: Lock, model: Derivation, file: str) -> Derivation | None:
    """The chat template's derivation; None = the engine takes the model's own."""
    wanted = spec.template
    if not wanted.is_own:
        return None
    name = f"{spec.name}-template"
    if wanted.source == "model":
        params: dict[str, Json] = {"file": file}
        if wanted.expect_sha256:
            params["sha256"] = wanted.expect_sha256
        plain = step("extract-template", name, params, {"model": model})
    elif wanted.source == "inline":
        plain = step("extract-template", name, {"text": wanted.text}, {})
    else:
        if lock.template is None:
            raise InvalidInput("the lock names no template file", remedy="make the lock again")
        plain = _fetch(name, [lock.template])
    if not wanted.patches:
        return plain
    patches: dict[str, Json] = {"patches": [dict(patch) for patch in wanted.patches]}
    return step("patch-template", name, patches, {"template": plain})
