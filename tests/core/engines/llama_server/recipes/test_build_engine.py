"""build-engine: real CMake, Ninja and compiler, on a source tree that is small."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.recipes.build_engine import (
    RECIPE,
    configure_flags,
    read_options,
)
from mmadmin.core.errors import InvalidDerivation, StepFailed, ToolMissing
from mmadmin.host import compiler
from tests.support.engine import EngineStore
from tests.support.tools import Attempt, attempt

PARAMS: dict[str, Json] = {
    "backend": "cpu",
    "native": False,
    "cpu": "",
    "cuda": "",
    "cuda_architectures": [],
    "arch": "x86_64-linux",
    "compiler": "gcc-12.2.0",
    "defines": {},
    "targets": ["llama-server", "llama-gguf-split"],
}
CUDA: dict[str, Json] = {
    **PARAMS,
    "backend": "cuda",
    "cuda": "12.8",
    "cuda_architectures": [70],
}

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(part STATIC part.cpp other.cpp)
add_executable(llama-server main.cpp)
add_executable(llama-gguf-split main.cpp)
target_link_libraries(llama-server part)
target_link_libraries(llama-gguf-split part)
"""
MAIN = """
#include <cstdio>
#include <string>
std::string where();
std::string here();
int main() {
    std::printf("%s %s %s %s\\n", where().c_str(), here().c_str(), __DATE__, __TIME__);
    return EXIT;
}
"""


def tiny_source(folder: Path, *, exit_code: int = 0) -> Path:
    """A CMake project with llama.cpp's target names that prints where it was built."""
    folder.mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "main.cpp").write_text(MAIN.replace("EXIT", str(exit_code)))
    for name, function in (("part", "where"), ("other", "here")):
        text = f"#include <string>\nstd::string {function}() {{ return __FILE__; }}\n"
        (folder / f"{name}.cpp").write_text(text)
    (folder / "LICENSE").write_text("MIT")
    return folder


def here() -> dict[str, Json]:
    """Params for this host's compiler."""
    return {**PARAMS, "compiler": compiler.compiler().label}


def compiled(tmp_path: Path, name: str, **config: object) -> Attempt:
    """Build the tiny project in a folder of its own."""
    work = attempt(tmp_path / name, **config)
    work.build(RECIPE, here(), source=tiny_source(tmp_path / name / "deep" / "source"))
    return work


def test_programs_come_out_and_start(tmp_path: Path) -> None:
    """Targets in bin/, facts and licence beside them, progress from Ninja's lines."""
    work = compiled(tmp_path, "one")
    assert sorted(
        p.relative_to(work.out).as_posix() for p in work.out.rglob("*") if p.is_file()
    ) == [
        "LICENSE",
        "bin/llama-gguf-split",
        "bin/llama-server",
        "engine.json",
    ]
    facts = json.loads((work.out / "engine.json").read_text())
    assert facts["compiler"] == compiler.compiler().label
    assert facts["targets"] == ["llama-server", "llama-gguf-split"]
    assert str(tmp_path) not in (work.out / "engine.json").read_text()
    steps = [done for done, _total, unit in work.progress if unit == "steps"]
    assert steps
    assert work.progress[-1][0] == work.progress[-1][1]
    moved = work.out.rename(tmp_path / "moved")
    said = subprocess.run([moved / "bin/llama-server"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("/source/part.cpp /source/other.cpp Jan  1 1970")


def test_another_folder_and_job_count_give_the_same_bytes(tmp_path: Path) -> None:
    """Paths, clock and scheduling leave no trace."""
    one = compiled(tmp_path, "one", jobs=1)
    two = compiled(tmp_path, "some-other-folder", jobs=4)
    for name in ("llama-server", "llama-gguf-split"):
        assert (one.out / "bin" / name).read_bytes() == (two.out / "bin" / name).read_bytes()
    assert (one.out / "engine.json").read_bytes() == (two.out / "engine.json").read_bytes()


UNITED_CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(llama-common STATIC part.cpp other.cpp json.cpp)
add_executable(llama-server main.cpp)
target_link_libraries(llama-server llama-common)
"""


def united(tmp_path: Path, name: str, more: str = "") -> Attempt:
    """Build a project with one of the united libraries; `more` stands in two of its files."""
    source = tiny_source(tmp_path / name / "source")
    (source / "CMakeLists.txt").write_text(UNITED_CMAKE)
    for file in (source / "part.cpp", source / "other.cpp"):
        file.write_text(more + file.read_text())
    (source / "json.cpp").write_text("int alone = 1;\n")
    work = attempt(tmp_path / name)
    work.build(RECIPE, {**here(), "targets": ["llama-server"], "unity": True}, source=source)
    return work


def test_several_files_are_compiled_at_once(tmp_path: Path) -> None:
    """Of a library that is known for it, all but the file that must be alone; the same bytes twice."""
    one = united(tmp_path, "one")
    assert "llama-common.dir/Unity/unity_0_cxx.cxx.o" in one.log
    assert "llama-common.dir/json.cpp.o" in one.log
    assert "llama-common.dir/part.cpp.o" not in one.log
    two = united(tmp_path, "two")
    assert (one.out / "bin/llama-server").read_bytes() == (
        two.out / "bin/llama-server"
    ).read_bytes()


def test_files_that_clash_are_compiled_one_by_one(tmp_path: Path) -> None:
    """A release whose files define one name twice is built all the same."""
    work = united(tmp_path, "clash", "static int same = 1;\n")
    assert "compiling them one by one" in work.log
    assert "llama-common.dir/part.cpp.o" in work.log
    assert (work.out / "bin/llama-server").is_file()


def test_a_checkout_around_it_leaves_no_trace(tmp_path: Path) -> None:
    """Inside a git repository, its commit does not get into the build."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    source = tiny_source(tmp_path / "source")
    probe = 'execute_process(COMMAND git rev-parse --git-dir RESULT_VARIABLE r)\nmessage("git says ${r}")\n'
    with (source / "CMakeLists.txt").open("a") as file:
        file.write(probe)
    work = attempt(tmp_path / "work")
    work.build(RECIPE, here(), source=source)
    assert any(line.startswith("git says ") and line != "git says 0" for line in work.lines)


def test_a_host_with_another_compiler_than_planned_is_refused(tmp_path: Path) -> None:
    """The plan is made again instead of mislabelling the result."""
    params = {**PARAMS, "compiler": "gcc-4.8.5"}
    with pytest.raises(StepFailed, match=r"plan is for compiler gcc-4\.8\.5, this host has gcc-"):
        attempt(tmp_path / "w").build(RECIPE, params, source=tiny_source(tmp_path / "s"))


def test_a_host_without_a_compiler_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ is not there: what to install is said."""
    real = compiler.shutil.which
    monkeypatch.setattr(
        compiler.shutil,
        "which",
        lambda name, **options: None if name == "g++" else real(name, **options),
    )
    with pytest.raises(ToolMissing, match=r"g\+\+ is not installed.*apt-get install g\+\+"):
        attempt(tmp_path / "w").build(RECIPE, here(), source=tiny_source(tmp_path / "s"))


def test_a_compile_error_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    """The compiler's words are in the error."""
    source = tiny_source(tmp_path / "s")
    (source / "part.cpp").write_text("this is no C++\n")
    with pytest.raises(StepFailed) as caught:
        attempt(tmp_path / "w").build(RECIPE, here(), source=source)
    assert any("part.cpp" in line for line in caught.value.details["log_tail"])


def test_a_program_that_does_not_start_is_no_engine(tmp_path: Path) -> None:
    """llama-server is run once before the object is sealed."""
    source = tiny_source(tmp_path / "s", exit_code=1)
    with pytest.raises(StepFailed, match="llama-server ended with exit code 1"):
        attempt(tmp_path / "w").build(RECIPE, here(), source=source)


def test_an_unknown_target_or_tree_is_said(tmp_path: Path) -> None:
    """A misspelt target fails in words; so does a tree without CMakeLists.txt."""
    params = {**here(), "targets": ["llama-serve"]}
    with pytest.raises(StepFailed, match="llama-serve"):
        attempt(tmp_path / "w").build(RECIPE, params, source=tiny_source(tmp_path / "s"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidDerivation, match=r"no CMakeLists\.txt"):
        attempt(tmp_path / "w").build(RECIPE, here(), source=tmp_path / "empty")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({**PARAMS, "backend": "vulkan"}, "cpu or cuda"),
        ({**PARAMS, "cuda_architectures": [70]}, "none for a CPU build"),
        ({**CUDA, "cuda_architectures": []}, "compute capabilities"),
        ({**CUDA, "cuda_architectures": ["7.0"]}, "without the dot"),
        ({**CUDA, "cuda": ""}, "toolkit's version"),
        ({**CUDA, "cuda": "13.0"}, "CUDA 13.0 cannot build for sm_70.*CUDA 12"),
        ({**PARAMS, "defines": {"a b": "ON"}}, "a CMake variable name"),
        ({**PARAMS, "defines": {"X": "$(rm)"}}, "letters, digits, spaces"),
        ({**PARAMS, "defines": {"GGML_NATIVE": "ON"}}, "its own param"),
        ({**PARAMS, "targets": ["all"]}, "a target such as llama-server"),
        ({**PARAMS, "jobs": 4}, "unknown fields: jobs"),
        ({"backend": "cpu"}, "lacks compiler"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Refused before anything is compiled; CUDA 13 for old GPUs with the remedy."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)


def test_cuda_13_is_fine_for_what_it_knows() -> None:
    """Turing and later; CUDA 12 for Volta."""
    RECIPE.check({**CUDA, "cuda": "13.0", "cuda_architectures": [75, 90]})
    RECIPE.check(CUDA)


def test_flags_say_what_the_params_say() -> None:
    """The whole set for a V100 host; other defines win over defaults, never over params."""
    defines = {
        "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
        "GGML_CUDA_F16": "ON",
        "GGML_OPENMP": "ON",
    }
    params = {**CUDA, "native": True, "defines": defines}
    flags = configure_flags(read_options(params), Path("/s"), Path("/b"))
    maps = "-ffile-prefix-map=/s=/source -ffile-prefix-map=/b=/build"
    assert flags == [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DGGML_NATIVE=ON",
        "-DGGML_CUDA=ON",
        "-DGGML_CCACHE=OFF",
        "-DGGML_OPENMP=ON",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        "-DGGML_CUDA_F16=ON",
        f"-DCMAKE_C_FLAGS={maps}",
        f"-DCMAKE_CXX_FLAGS={maps}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static-libgcc -static-libstdc++",
        "-DCMAKE_CUDA_ARCHITECTURES=70",
        f'-DCMAKE_CUDA_FLAGS=-objtemp -Xcompiler="{maps}"',
    ]
    without = configure_flags(read_options({**CUDA, "without_amx": True}), Path("/s"), Path("/b"))
    united = configure_flags(read_options({**CUDA, "unity": True}), Path("/s"), Path("/b"))
    assert "-DLLAMA_ALL_WARNINGS=OFF" in united
    assert f"-DCMAKE_CXX_FLAGS={maps} --param=ggc-min-heapsize=524288" in united
    amx = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert f"-DCMAKE_CXX_FLAGS={maps} {amx}" in without
    assert f"-DCMAKE_C_FLAGS={maps} {amx}" in without


@pytest.mark.engine
def test_the_real_engine_needs_only_the_c_library(engine_store: EngineStore) -> None:
    """Built by this recipe from llama.cpp's source: found anywhere, no path of the host inside."""
    programs = {"llama-server": "engine", "llama-gguf-split": "tools", "llama-quantize": "tools"}
    for name, made_by in programs.items():
        folder = engine_store.path(made_by) / "bin"
        linked = subprocess.run(["ldd", folder / name], capture_output=True, text=True, check=True)
        names = {line.split()[0] for line in linked.stdout.splitlines()}
        assert {n for n in names if not n.startswith(("linux-vdso", "/lib64/ld-"))} <= {
            "libm.so.6",
            "libc.so.6",
        }
        data = (folder / name).read_bytes()
        assert str(engine_store.store.root).encode() not in data
        assert os.fsencode(Path.home()) not in data or Path.home() == Path("/")
