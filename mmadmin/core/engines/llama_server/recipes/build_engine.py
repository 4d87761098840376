"""`build-engine`: llama.cpp from its source tree, by CMake and Ninja.

inputs: `source`, a tree with `CMakeLists.txt` at its top. params: `backend` ("cpu" | "cuda"),
`cuda_architectures` ([70, …]: required for cuda), `cuda` (toolkit version as "12.8"), `native`
(tune for this host's CPU), `cpu` (what identifies that CPU, "" unless native), `arch`, `compiler`
("gcc-12.2.0"), `defines` ({"GGML_X": "ON"}), `targets`, `without_amx` (false), `unity` (false:
one compiler run per source file; true: several files of a library in one run, which is faster).

Output: `bin/<target>` (statically linked against the source's own libraries, found anywhere),
`engine.json` (how it was built) and `LICENSE`. The identity is source + params: a program's own
`--version` says nothing outside a git clone.

Reproducible by construction: paths are mapped away, no clock, no git, deterministic archives. What
that gives in fact is measured in docs/recipes/build-engine.md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmadmin.core.build.params import (
    CMAKE_VALUE,
    CMAKE_VALUE_TAKES,
    fields,
    flag,
    input_folder,
    items,
    refuse,
    table,
    text,
    texts,
)
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.errors import InvalidDerivation, MmError, StepFailed

DEFAULT_TARGETS = ("llama-server", "llama-gguf-split", "llama-quantize")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TARGET = re.compile(r"llama-[a-z0-9-]+")
CUDA_VERSION = re.compile(r"(\d+)\.(\d+)")
NINJA_PROGRESS = re.compile(r"\[(\d+)/(\d+)\]")
COMPILER_LINE = re.compile(r"The (C|CXX) compiler identification is (\S+) (\S+)")
CUDA_LINE = re.compile(r"The CUDA compiler identification is NVIDIA (\d+\.\d+)")
CUDA_13 = 13
TURING = 75
ROOM_BYTES = {"cpu": 1 << 30, "cuda": 6 << 30}
"""What objects and programs of a build take at most, generously."""
OURS = (
    "CMAKE_BUILD_TYPE",
    "BUILD_SHARED_LIBS",
    "GGML_NATIVE",
    "GGML_CUDA",
    "GGML_CCACHE",
    "CMAKE_CUDA_ARCHITECTURES",
    "CMAKE_C_FLAGS",
    "CMAKE_CXX_FLAGS",
    "CMAKE_CUDA_FLAGS",
)
"""Definitions that have a param of their own."""
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
"""GCC's `_tile_loadconfig` (seen in 12.2) tells the optimizer that it reads 8 of its operand's 64
bytes. The stores of the others are dropped, and llama.cpp's AMX code ends by SIGSEGV or SIGILL.
"""

UNITED: Mapping[str, tuple[int, str]] = {
    "llama": (12, "^$"),
    "llama-common": (12, r"/json\\.cpp$"),
    "mtmd": (12, r"/(mtmd[^/]*|clip)\\.cpp$"),
    "server-context": (6, "^$"),
    "llama-server-impl": (12, "^$"),
}
"""Libraries whose sources are compiled several at once: how many, and which files are not.

Of ggml, whose kernels decide the speed, every file is compiled as upstream does it. The library
that comes last is in two parts of equal weight, so that two cores end together.
"""
UNITY_FLAGS = ("--param=ggc-min-heapsize=524288",)
"""GCC collects its garbage only above 512 MiB: less work, and no other code."""
UNITE = """function(unite target files alone)
  if(NOT TARGET ${target})
    return()
  endif()
  get_target_property(folder ${target} SOURCE_DIR)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "[.]cpp$")
  list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target}
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)
  list(FILTER sources INCLUDE REGEX "${alone}")
  if(sources)
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target}
      PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${files})
endfunction()
"""
"""CMake reads this before the project, and calls it when the project's targets are known."""


@dataclass(frozen=True, slots=True)
class Options:
    """The params, read."""

    backend: str
    cuda_architectures: Sequence[int]
    cuda: str
    native: bool
    cpu: str
    arch: str
    compiler: str
    defines: Mapping[str, str]
    targets: Sequence[str]
    without_amx: bool
    unity: bool


def read_options(params: Params) -> Options:
    """The params, checked. Raises `InvalidDerivation`."""
    where = "build-engine"
    fields(
        params,
        where,
        required=("backend", "compiler"),
        optional=(
            *("cuda_architectures", "cuda", "native", "cpu", "arch", "defines", "targets"),
            *("without_amx", "unity"),
        ),
    )
    options = Options(
        backend=text(params, "backend", where),
        cuda_architectures=[
            _architecture(v, f"{where}.cuda_architectures[{i}]")
            for i, v in enumerate(items(params, "cuda_architectures", where))
        ],
        cuda=text(params, "cuda", where, ""),
        native=flag(params, "native", where, default=False),
        cpu=text(params, "cpu", where, ""),
        arch=text(params, "arch", where, ""),
        compiler=text(params, "compiler", where),
        defines=_defines(params, where),
        targets=texts(params, "targets", where) or list(DEFAULT_TARGETS),
        without_amx=flag(params, "without_amx", where, default=False),
        unity=flag(params, "unity", where, default=False),
    )
    for i, target in enumerate(options.targets):
        if not TARGET.fullmatch(target):
            refuse(f"{where}.targets[{i}]", target, "a target such as llama-server")
    if options.backend not in ("cpu", "cuda"):
        refuse(f"{where}.backend", options.backend, "cpu or cuda")
    _check_cuda(options, where)
    return options


def _architecture(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 50 <= value <= 200:  # noqa: PLR2004
        refuse(where, value, "a compute capability without the dot, such as 70")
    return value


def _defines(params: Params, where: str) -> dict[str, str]:
    defines = table(params.get("defines", {}), f"{where}.defines")
    for name, value in defines.items():
        if not NAME.fullmatch(name):
            refuse(f"{where}.defines", name, "a CMake variable name")
        if not isinstance(value, str) or not CMAKE_VALUE.fullmatch(value):
            refuse(f"{where}.defines.{name}", value, f"a value of {CMAKE_VALUE_TAKES}")
        if name in OURS:
            refuse(f"{where}.defines.{name}", value, "it through its own param")
    return {name: str(value) for name, value in sorted(defines.items())}


def _check_cuda(options: Options, where: str) -> None:
    if options.backend == "cpu":
        if options.cuda_architectures:
            refuse(
                f"{where}.cuda_architectures", options.cuda_architectures, "none for a CPU build"
            )
        return
    if not options.cuda_architectures:
        refuse(f"{where}.cuda_architectures", [], "the host's compute capabilities, such as [70]")
    version = CUDA_VERSION.fullmatch(options.cuda)
    if version is None:
        refuse(f"{where}.cuda", options.cuda, "the CUDA toolkit's version, such as 12.8")
    too_old = [sm for sm in options.cuda_architectures if sm < TURING]
    if int(version.group(1)) >= CUDA_13 and too_old:
        raise InvalidDerivation(
            f"CUDA {options.cuda} cannot build for sm_{too_old[0]}: CUDA 13 dropped everything "
            f"below sm_{TURING}",
            remedy="install a CUDA 12 toolkit (12.8 is known to work) and plan again",
            field=f"{where}.cuda_architectures",
        )


def configure_flags(options: Options, source: Path, build: Path) -> list[str]:
    """CMake's definitions: the derivation's part, then what makes the bytes reproducible."""
    maps = f"-ffile-prefix-map={source}=/source -ffile-prefix-map={build}=/build"
    one_run = UNITY_FLAGS if options.unity and options.compiler.startswith("gcc") else ()
    flags = " ".join([maps, *(NO_AMX if options.without_amx else ()), *one_run])
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_NATIVE": "ON" if options.native else "OFF",
        "GGML_CUDA": "ON" if options.backend == "cuda" else "OFF",
        "GGML_CCACHE": "OFF",
        "GGML_OPENMP": "OFF",  # its own thread pool is as fast, and libgomp is not a static library
        "LLAMA_CURL": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        **({"LLAMA_ALL_WARNINGS": "OFF"} if options.unity else {}),
        **options.defines,
        "CMAKE_C_FLAGS": flags,
        "CMAKE_CXX_FLAGS": flags,
        "CMAKE_EXE_LINKER_FLAGS": "-static-libgcc -static-libstdc++",
    }
    if options.backend == "cuda":
        defines["CMAKE_CUDA_ARCHITECTURES"] = ";".join(map(str, options.cuda_architectures))
        # Without -objtemp nvcc writes its process id into every object.
        defines["CMAKE_CUDA_FLAGS"] = f'-objtemp -Xcompiler="{maps}"'
    else:
        defines["CMAKE_SKIP_RPATH"] = "ON"
    return [f"-D{name}={value}" for name, value in defines.items()]


def unity_script() -> str:
    """What CMake is to do so that the libraries of `UNITED` are compiled several files at once."""
    later = 'cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL unite'
    calls = [f'{later} {target} {files} "{alone}")' for target, (files, alone) in UNITED.items()]
    return "\n".join([UNITE, *calls, ""])


class _Configured:
    """Watches CMake's output for the compilers that it really took."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.error: MmError | None = None

    def __call__(self, line: str) -> None:
        if found := COMPILER_LINE.search(line):
            taken = f"{found[2].replace('GNU', 'gcc').lower()}-{found[3]}"
            self._compare("compiler", taken, self.options.compiler)
        elif found := CUDA_LINE.search(line):
            self._compare("CUDA toolkit", found[1], self.options.cuda)

    def _compare(self, what: str, taken: str, planned: str) -> None:
        if taken != planned:
            self.error = StepFailed(
                f"the plan is for {what} {planned}, this host has {taken}",
                remedy="plan again: the host has changed since",
                exit_code=None,
                log_tail=[],
            )


class BuildEngine:
    """Source tree in, programs out."""

    kind = "build-engine"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params, and CUDA ≥ 13 with architectures that it dropped."""
        read_options(params)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Configure, compile, prove that the programs start."""
        options = read_options(params)
        source = input_folder(inputs, "source")
        if not (source / "CMakeLists.txt").is_file():
            raise InvalidDerivation(
                "the source tree has no CMakeLists.txt at its top",
                remedy="unpack the folder that holds llama.cpp itself",
            )
        tools.reserve(ROOM_BYTES[options.backend])
        build = tools.scratch / "build"
        try:
            self._make(options, source, build, tools)
        except StepFailed:
            if not options.unity:
                raise
            tools.log("compiling several files at once failed; compiling them one by one")
            shutil.rmtree(build)
            self._make(replace(options, unity=False), source, build, tools)
        self._collect(options, source, build, out, tools)

    def _make(self, options: Options, source: Path, build: Path, tools: Toolbox) -> None:
        build.mkdir()
        env = self._configure(options, source, build, tools)
        self._compile(options, build, env, tools)

    def _configure(
        self, options: Options, source: Path, build: Path, tools: Toolbox
    ) -> dict[str, str]:
        gcc, gxx = tools.find("gcc"), tools.find("g++")
        cmake, ninja = tools.find("cmake"), tools.find("ninja")
        extra = [f"-DCMAKE_C_COMPILER={gcc}", f"-DCMAKE_CXX_COMPILER={gxx}"]
        env: dict[str, str] = {}
        if options.unity:
            script = tools.scratch / "unity.cmake"
            script.write_text(unity_script(), encoding="utf-8")
            extra.append(f"-DCMAKE_PROJECT_TOP_LEVEL_INCLUDES={script}")
        if options.backend == "cuda":
            nvcc = tools.find("nvcc")
            extra.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
            env["PATH"] = f"{nvcc.parent}:/usr/local/bin:/usr/bin:/bin"
        seen = _Configured(options)
        tools.log("configuring")
        tools.run(
            [
                *(str(cmake), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
                *("-S", str(source), "-B", str(build)),
                *extra,
                *configure_flags(options, source, build),
            ],
            env=env,
            on_line=seen,
        )
        if seen.error is not None:
            raise seen.error
        return env

    def _compile(self, options: Options, build: Path, env: dict[str, str], tools: Toolbox) -> None:
        def show(line: str) -> None:
            if found := NINJA_PROGRESS.match(line):
                tools.progress(int(found[1]), int(found[2]), "steps")

        tools.log(f"compiling {', '.join(options.targets)} with {tools.jobs} jobs")
        tools.run(
            [str(tools.find("ninja")), "-C", str(build), f"-j{tools.jobs}", *options.targets],
            env=env,
            on_line=show,
        )

    def _collect(
        self, options: Options, source: Path, build: Path, out: Path, tools: Toolbox
    ) -> None:
        folder = out / "bin"
        folder.mkdir()
        for target in options.targets:
            built = build / "bin" / target
            if not built.is_file():
                raise StepFailed(
                    f"the build made no {target}",
                    remedy="this source has no such program; check `targets`",
                    exit_code=0,
                    log_tail=[],
                )
            shutil.move(built, folder / target)
            (folder / target).chmod(0o755)
        if options.backend == "cpu" and "llama-server" in options.targets:
            # A CUDA build would need the driver, which a build host may lack.
            tools.run([str(folder / "llama-server"), "--version"])
        if (source / "LICENSE").is_file():
            shutil.copyfile(source / "LICENSE", out / "LICENSE")
        facts = {
            "format": 1,
            "engine": "llama.cpp",
            "backend": options.backend,
            "cuda_architectures": list(options.cuda_architectures),
            "cuda": options.cuda,
            "native": options.native,
            "cpu": options.cpu,
            "arch": options.arch,
            "compiler": options.compiler,
            "defines": dict(options.defines),
            "targets": list(options.targets),
        }
        text_ = json.dumps(facts, indent=1, sort_keys=True) + "\n"
        (out / "engine.json").write_text(text_, encoding="utf-8")


RECIPE: Recipe = BuildEngine()
