"""How llama-server's models are measured on a text: by `llama-perplexity` of the same source."""

from __future__ import annotations

from mmadmin.core.build.derivation import Derivation, thawed
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.parts import KIND, compiled_tools, parts
from mmadmin.core.engines.llama_server.recipes.measure_perplexity import PROGRAM
from mmadmin.core.engines.protocol import TextMeasure
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec
from mmadmin.core.spec.steps import fetch, step

TARGET = PROGRAM.rpartition("/")[2]


def perplexity_program(spec: Spec, lock: Lock, facts: HostFacts, engine: Derivation) -> Derivation:
    """The program that measures, from the engine's own source or prebuilt archive, for the CPU."""
    if engine.recipe == "build-engine":
        return compiled_tools(spec, lock, facts, TARGET, [TARGET])
    name = f"{TARGET}-{engine.name.removeprefix(f'{KIND}-')}"
    return step(engine.recipe, name, {**thawed(engine.params), "targets": [TARGET]}, engine.inputs)


def text_report(spec: Spec, lock: Lock, facts: HostFacts, measure: TextMeasure) -> Derivation:
    """The step whose object is the report."""
    made = parts(spec, lock, facts)
    params: dict[str, Json] = {
        "file": made.files["model"],
        "text": measure.text.path,
        "context": measure.context,
    }
    if measure.chunks:
        params["chunks"] = measure.chunks
    inputs = {
        "model": made.inputs["model"],
        "engine": perplexity_program(spec, lock, facts, made.inputs["engine"]),
        "text": fetch(measure.text.path, [measure.text]),
    }
    return step("measure-perplexity", f"{spec.name}-perplexity", params, inputs)
