"""`verify-checkpoint`: a checkpoint in, a report of what it says about itself out.

inputs: `model`. params: `{"file": "config.json"}`, any file of the checkpoint. Output:
`report.json`. The files are read by a limited child; anything wrong with them is `InvalidModel` and
no object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, relative_path, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical
from mmadmin.core.formats.checkpoint.check import ask

REPORT = "report.json"


class VerifyCheckpoint:
    """Checkpoint in, report out."""

    kind = "verify-checkpoint"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        fields(params, self.kind, required=("file",))
        relative_path(text(params, "file", self.kind), f"{self.kind}.file")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Read config, index and headers in a limited child and keep what they say."""
        file = input_file(inputs, "model", text(params, "file", self.kind))
        tools.log(f"reading {file.name} and the headers of the weights beside it")
        report = ask(file, tools)["report"]
        (out / REPORT).write_bytes(canonical(report))


RECIPE: Recipe = VerifyCheckpoint()
