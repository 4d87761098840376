"""`toy-engine` writes the server's program into an object, `toy-report` says what a model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from mm_toy.model import FORMAT
from mmadmin.core.build.params import fields, input_file, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical

SERVER = Path(__file__).with_name("server.py")
PROGRAM = "bin/toy-server.py"


def server_digest() -> str:
    """Of the program, which is a parameter: a changed program is another engine."""
    return sha256(SERVER.read_bytes()).hexdigest()


class BuildToy:
    """The engine."""

    kind = "toy-engine"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """`{"server_sha256", "greeting"}`."""
        fields(params, self.kind, required=("server_sha256", "greeting"))

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Copy the program with its greeting."""
        program = SERVER.read_text(encoding="utf-8")
        (out / "bin").mkdir()
        (out / PROGRAM).write_text(
            program.replace('GREETING = ""', f"GREETING = {params['greeting']!r}"), encoding="utf-8"
        )
        tools.log("the toy engine is built")


class ReportToy:
    """What a model says."""

    kind = "toy-report"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """`{"file"}`."""
        fields(params, self.kind, required=("file",))

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Read the model."""
        header = FORMAT.read_header(input_file(inputs, "model", text(params, "file", self.kind)))
        report = {
            "name": header.name,
            "words": header.parameters,
            "size_bytes": header.size_bytes,
            "context_length": header.context_train,
        }
        (out / "report.json").write_bytes(canonical(report))


BUILD: Recipe = BuildToy()
REPORT: Recipe = ReportToy()
