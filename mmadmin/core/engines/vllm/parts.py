"""What a lock pins for vLLM, and what its system is built from.

fetch (wheels) ─ python-env ─┬─ vllm-options ─ vllm-command ─┐
                             ├───────────────────────────────┼─ system
fetch ─ [quantize-checkpoint] ─┬─ verify-checkpoint ─────────┤
                               └─ [extract-template ─ patch-template]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import Parts
from mmadmin.core.engines.vllm.corrections import corrections
from mmadmin.core.engines.vllm.recipes.vllm_command import OUTPUT as COMMAND
from mmadmin.core.engines.vllm.recipes.vllm_options import program_digest
from mmadmin.core.engines.vllm.spec import VllmBuild
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.checkpoint.parts import (
    MODEL,
    fetched,
    model_derivation,
    pin_requests,
    report_derivation,
)
from mmadmin.core.formats.checkpoint.sets import CONFIG, SUFFIX, file_name
from mmadmin.core.formats.checkpoint.tables import CheckpointModel
from mmadmin.core.recipes import python_env
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.pins import Packages, PinRequest
from mmadmin.core.spec.spec import Spec
from mmadmin.core.spec.steps import step

KIND = "vllm"
ENGINE = "engine"


def pins(spec: Spec) -> Sequence[PinRequest]:
    """The checkpoint, what quantises it, and the packages of the engine."""
    model, build = cast("CheckpointModel", spec.model), cast("VllmBuild", spec.engine)
    overrides = tuple(f'{name} ; sys_platform == "never"' for name in build.leave_out)
    question: dict[str, Json] = {
        "requirements": list(build.all_requirements),
        "leave_out": list(build.leave_out),
    }
    packages = Packages(build.all_requirements, overrides)
    engine = PinRequest(ENGINE, ENGINE, question, None, "engine.package", packages=packages)
    return [*pin_requests(model), engine]


def parts(spec: Spec, lock: Lock, facts: HostFacts) -> Parts:
    """Environment, checkpoint, report and the checked command; the template where it is patched."""
    wanted, build = cast("CheckpointModel", spec.model), cast("VllmBuild", spec.engine)
    overlays = corrections(build, lock, ENGINE)
    environment = python_env.derivation(lock, ENGINE, build.all_requirements, overlays)
    asked: dict[str, Json] = {"program": program_digest()}
    options = step(
        "vllm-options", f"{KIND}-{build.version}-options", asked, {"environment": environment}
    )
    serve: dict[str, Json] = {"serve": dict(spec.tables["serve"])}
    model = model_derivation(wanted, lock, facts)
    made = {
        "engine": environment,
        "model": model,
        "report": report_derivation(model.name, model),
        "command": step("vllm-command", f"{spec.name}-command", serve, {"options": options}),
    }
    return Parts(made, {"command": COMMAND}, _template(spec, lock))


def published(spec: Spec, lock: Lock) -> dict[str, tuple[Derivation, str]]:
    """The checkpoint as it was fetched, by its configuration."""
    return {MODEL: (fetched(spec.model, lock), CONFIG)}


def _template(spec: Spec, lock: Lock) -> Derivation | None:
    """The template of the published checkpoint, which quantising leaves as it is."""
    wanted, model = spec.template, fetched(spec.model, lock)
    if not wanted.is_own or wanted.source != "model":
        return None
    weights = (file_name(file.path) for file in lock.of(MODEL))
    params: dict[str, Json] = {"file": next(name for name in weights if name.endswith(SUFFIX))}
    if wanted.expect_sha256:
        params["sha256"] = wanted.expect_sha256
    return step("extract-template", f"{spec.name}-template", params, {"model": model})
