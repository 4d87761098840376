"""`vllm-command`: a `[serve]` table, checked by the options of the pinned vLLM.

inputs: `options` (see `vllm-options`). params: `{"serve": {…}}`. Output: `serve.json`, the table
itself. A command that vLLM would refuse with exit code 1 or 2 is refused here, by its field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, table
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.engines.vllm.command import check_command, read_parser
from mmadmin.core.engines.vllm.recipes.vllm_options import OUTPUT as OPTIONS

OUTPUT = "serve.json"


class VllmCommand:
    """Options and a table in, the table out."""

    kind = "vllm-command"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        fields(params, self.kind, required=("serve",))
        table(params["serve"], f"{self.kind}.serve")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Check every option by name and value."""
        serve = table(params["serve"], f"{self.kind}.serve")
        check_command(
            serve, read_parser(parse(input_file(inputs, "options", OPTIONS).read_bytes()))
        )
        (out / OUTPUT).write_bytes(canonical(serve))
        tools.log(f"{len(serve)} settings are options of this version")


RECIPE: Recipe = VllmCommand()
