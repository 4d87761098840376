"""`[model]` and `[engine]` of a deployment with llama-server, typed and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmadmin.core.build.params import CMAKE_VALUE, CMAKE_VALUE_TAKES
from mmadmin.core.build.recipe import Json
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.gguf.sets import SUFFIX
from mmadmin.core.spec.fields import refuse, tuples
from mmadmin.core.spec.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaModel(Origin):
    """`[model]`: which model, from where, and what is done to it."""

    quant: str = ""
    files: tuple[str, ...] = ()
    file: str = ""
    merge: bool = True
    quantize: str = ""
    mmproj: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBuild(Origin):
    """`[engine]`: the source of llama.cpp, and how it is built."""

    source: str = "index"
    subtree: str = "*/llama.cpp"
    prebuilt: bool = False
    licences: tuple[str, ...] = ()
    backend: str = "auto"
    cuda_architectures: tuple[int, ...] = ()
    native: bool = True
    defines: Mapping[str, Json] = field(default_factory=dict)

    def backend_on(self, facts: HostFacts) -> str:
        """`cuda` or `cpu`: what a build on this host is made for."""
        if self.backend != "auto":
            return self.backend
        return "cuda" if facts.gpus and facts.cuda else "cpu"


def read_model(values: Mapping[str, Json]) -> LlamaModel:
    """The `[model]` table, whose values were checked one by one. Raises `InvalidSpec`."""
    model = LlamaModel(**tuples(values))
    if model.source == "hub":
        if bool(model.quant) == bool(model.files):
            refuse(
                "model.quant",
                "give either a quant or the list of files, not both and not neither",
                remedy='for example quant = "Q4_K_M"',
            )
        for n, name in enumerate(model.files):
            if not name.lower().endswith(SUFFIX):
                refuse(
                    f"model.files[{n}]", f'"{name}" is not a GGUF file', remedy="name .gguf files"
                )
    if model.source == "path" and model.mmproj and not model.mmproj.startswith("/"):
        refuse("model.mmproj", "this must be an absolute path here", remedy="write /…/mmproj.gguf")
    if model.source in ("hub", "index") and model.mmproj.startswith("/"):
        refuse(
            "model.mmproj",
            "an absolute path makes no sense here",
            remedy="write a path inside the repository or package",
        )
    return model


_DEFINE = re.compile(r"[A-Z][A-Z0-9_]*")
_OURS = (
    "CMAKE_CUDA_ARCHITECTURES",
    "CMAKE_BUILD_TYPE",
    "GGML_CUDA",
    "GGML_NATIVE",
    "BUILD_SHARED_LIBS",
)


def read_build(values: Mapping[str, Json], model: LlamaModel) -> LlamaBuild:
    """The `[engine]` table, whose values were checked one by one. Raises `InvalidSpec`."""
    build = LlamaBuild(**tuples({k: v for k, v in values.items() if k != "kind"}))
    for key, value in build.defines.items():
        _check_define(key, value)
    if build.prebuilt and model.quantize:
        refuse(
            "model.quantize",
            "a prebuilt engine has no tool to quantize with",
            remedy="build the engine from source, or use a model that is quantized already",
        )
    if build.licences and not build.prebuilt:
        refuse(
            "engine.licences",
            "this makes no sense with an engine that is built",
            remedy="remove it, or set engine.prebuilt = true",
        )
    if build.cuda_architectures and build.backend == "cpu":
        refuse(
            "engine.cuda_architectures",
            'this makes no sense with backend = "cpu"',
            remedy='remove it, or set engine.backend to "cuda"',
        )
    return build


def _check_define(key: str, value: Json) -> None:
    dotted = f"engine.defines.{key}"
    if not _DEFINE.fullmatch(key):
        refuse(dotted, "this is not a CMake variable", remedy="write upper case letters, digits, _")
    if key in _OURS:
        refuse(
            dotted,
            "mmadmin sets this one itself",
            remedy="use engine.backend, engine.native or engine.cuda_architectures",
        )
    if isinstance(value, list | dict):
        refuse(dotted, "this must be one value", remedy="write text, a number, true or false")
    if not CMAKE_VALUE.fullmatch(str(value)):
        refuse(dotted, f"CMake cannot be given {str(value)!r}", remedy=f"write {CMAKE_VALUE_TAKES}")
