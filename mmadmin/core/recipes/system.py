"""`system`: what a generation runs, as a manifest; it copies no weights.

inputs: `report` and the parts that the engine names, such as `engine` and `model`. params:
`{"engine_kind", "alias", "options", "<part>_file"|null …}`: a part without a file is a folder.
Output: `manifest.json` (see `mmadmin.core.engines.system`), which names its inputs by their store
names, so the store keeps them alive with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, relative_path, table, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical
from mmadmin.core.engines.system import FILE, MANIFEST, part_files, write_manifest


class SystemRecipe:
    """Engine, model, template and options in, a manifest out."""

    kind = "system"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = True
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        files = part_files(params)
        fields(
            params,
            self.kind,
            required=("engine_kind", "alias", "options"),
            optional=[f"{part}{FILE}" for part in files],
        )
        text(params, "engine_kind", self.kind)
        text(params, "alias", self.kind)
        table(params["options"], "system.options")
        for part, file in files.items():
            if file is not None:
                field = f"{part}{FILE}"
                relative_path(text(params, field, self.kind), f"system.{field}")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Check that every named file is there, and write the manifest."""
        for part, file in part_files(params).items():
            if file is not None:
                input_file(inputs, part, str(file))
        manifest = write_manifest(params, inputs)
        (out / MANIFEST).write_bytes(canonical(manifest))
        tools.log(f"{params['alias']} on {params['engine_kind']}")


RECIPE: Recipe = SystemRecipe()
