"""`extract-template`: the chat template of a model, or one written in the spec, as a file.

Either input `model` with params `{"file": "name.ext"}` and, where patches were written for one
template, `sha256`: the digest that it must have; or no inputs with params
`{"text": "..."}`. Output: `chat_template.jinja`. The model is read by a limited child.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core import catalog
from mmadmin.core.build.params import fields, input_file, refuse, relative_path, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.errors import InvalidModel

OUTPUT = "chat_template.jinja"
SHA256 = re.compile(r"[0-9a-f]{64}")


def check_template(template: str, expected: str, where: str) -> None:
    """Refuse a template that is not the one that patches were written for (`InvalidModel`)."""
    found = hashlib.sha256(template.encode()).hexdigest()
    if expected and found != expected:
        raise InvalidModel(
            f"the chat template of {where} is another one than the patches were written for",
            remedy=(
                "look at it with `mm template test`; when the patches still fit, set "
                f'template.expect_sha256 = "{found}"'
            ),
            expected=expected,
            found=found,
        )


class ExtractTemplate:
    """Model in, its template out."""

    kind = "extract-template"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, optional=("file", "sha256", "text"))
        if ("file" in params) == ("text" in params) or {"text", "sha256"} <= set(params):
            refuse(self.kind, dict(params), "either file (and sha256) or text")
        if "sha256" in params and not SHA256.fullmatch(text(params, "sha256", self.kind)):
            refuse(f"{self.kind}.sha256", params["sha256"], "64 hex digits")
        if "text" in params:
            text(params, "text", self.kind)
        else:
            relative_path(text(params, "file", self.kind), f"{self.kind}.file")

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Write the template's text."""
        if "text" in params:
            template = text(params, "text", self.kind)
        else:
            file = input_file(inputs, "model", text(params, "file", self.kind))
            owner = catalog.format_of(file.name)
            own = owner.read_template(file, tools) if owner else None
            if own is None:
                raise InvalidModel(
                    f"{file.name} has no chat template",
                    remedy='give one in the spec: template.source = "file" or "inline"',
                )
            check_template(own, str(params.get("sha256", "")), file.name)
            template = own
        (out / OUTPUT).write_text(template, encoding="utf-8", newline="")
        tools.log(f"{len(template)} characters")


RECIPE: Recipe = ExtractTemplate()
