"""`verify-gguf`: a model in, a report of what it says about itself out.

inputs: `model`. params: `{"file": "name.gguf"}`; a shard's name means its whole set. Output:
`report.json`: counts, arrays (with digests), architecture, sizes, template hash, scalar metadata.
The file is read by a limited child; anything wrong with it is `InvalidModel` and no object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, relative_path, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.shards import find_set

REPORT = "report.json"


class VerifyGguf:
    """Model in, report out."""

    kind = "verify-gguf"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, required=("file",))
        relative_path(text(params, "file", self.kind), f"{self.kind}.file")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Read the headers in a limited child and keep what they say."""
        files = find_set(input_file(inputs, "model", text(params, "file", self.kind)))
        tools.log(f"reading {', '.join(file.name for file in files)}")
        report = ask(files, tools)["report"]
        (out / REPORT).write_bytes(canonical(report))


RECIPE: Recipe = VerifyGguf()
