"""`patch-template`: a chat template with patches that say what they change, shown by rendering.

inputs: `template` (`chat_template.jinja`). params: `{"patches": [...]}`, each one of
`{"kind": "set-default", "variable", "value"}`,
`{"kind": "coerce-unknown", "variable", "allowed": [...], "value"}`,
`{"kind": "replace", "old", "new"}`, `{"kind": "unified-diff", "diff"}`, or a named set:
`{"kind": "reasoning-effort-lenient"}`.

Output: `chat_template.jinja` and `rendering.json`: what each patch changes, and a matrix
of conversations rendered before and after with their differences. A patched template that does not
render a plain conversation properly, or fails where the original did not, does not become an
object. Templates run in a limited child only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, items, table
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.chat_templates.patches import (
    apply_patches,
    check_patches,
    compare,
    describe,
    render_matrix,
)
from mmadmin.core.recipes.extract_template import OUTPUT

REPORT = "rendering.json"


class PatchTemplate:
    """Template in, patched template and its rendering report out."""

    kind = "patch-template"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, required=("patches",))
        check_patches(params["patches"], f"{self.kind}.patches")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Patch, render before and after, compare."""
        patches = items(params, "patches", self.kind)
        before = input_file(inputs, "template", OUTPUT).read_bytes().decode("utf-8")
        after = apply_patches(before, patches, f"{self.kind}.patches")
        changes = [describe(table(patch, self.kind)) for patch in patches]
        for change in changes:
            tools.log(change)
        renders = render_matrix({"before": before, "after": after}, tools)
        rows = compare(renders["before"], renders["after"])
        report: Json = {"format": 1, "changes": list(changes), "rows": rows}
        (out / OUTPUT).write_text(after, encoding="utf-8", newline="")
        (out / REPORT).write_bytes(canonical(report))
        changed = [row for row in rows if table(row, "row")["changed"]]
        tools.log(f"{len(changed)} of {len(rows)} conversations render otherwise than before")


def rendering_of(template: Path) -> Json:
    """The report that lies beside a patched template; None for one that nobody patched."""
    try:
        return parse((template.parent / REPORT).read_bytes())
    except FileNotFoundError:
        return None


RECIPE: Recipe = PatchTemplate()
