"""Spec + lock + host facts → the goal derivation: the system that a generation runs.

The engine says what its system is made of (`Engine.parts`); the template's patches and the
`system` step that names all parts are the same for every engine.

Only facts that change bytes enter: compiler, CUDA version and architectures, the CPU's
instruction sets for a native build. Nothing of paths, host names or thread counts does.
"""

from __future__ import annotations

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import TEMPLATE
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.recipes.extract_template import OUTPUT
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec
from mmadmin.core.spec.steps import fetch, step


def assemble(spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
    """The system's derivation, with everything that it is built from.

    Raises `DoesNotFit` or `ToolMissing` when this host cannot build the engine.
    """
    parts = catalog.engine(spec.engine_kind).parts(spec, lock, facts)
    inputs = dict(parts.inputs)
    template = _template(spec, lock, parts.template)
    if template is not None:
        inputs[TEMPLATE] = template
    files = {**parts.files, TEMPLATE: OUTPUT if template is not None else None}
    params: dict[str, Json] = {
        "engine_kind": spec.engine_kind,
        "alias": spec.public_name,
        **{f"{part}_file": file for part, file in files.items()},
        "options": dict(spec.tables["serve"]),
    }
    return step("system", spec.name, params, inputs)


def _template(spec: Spec, lock: Lock, of_model: Derivation | None) -> Derivation | None:
    """The chat template's derivation; None = the engine takes the model's own."""
    wanted = spec.template
    name = f"{spec.name}-template"
    if wanted.source == "inline":
        plain: Derivation | None = step("extract-template", name, {"text": wanted.text}, {})
    elif wanted.source == "file":
        plain = fetch(name, [lock.one(TEMPLATE)])
    else:
        plain = of_model
    if plain is None or not wanted.patches:
        return plain
    patches: dict[str, Json] = {"patches": [dict(patch) for patch in wanted.patches]}
    return step("patch-template", name, patches, {"template": plain})
