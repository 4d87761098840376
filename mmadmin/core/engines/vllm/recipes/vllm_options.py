"""`vllm-options`: an environment with vLLM in, the options of its `vllm serve` out.

inputs: `environment` (see `python-env`). params: `{"program": …}`, the digest of the script that
asks vLLM's own argument parser. Output: `options.json`: names, what each option takes, and the
names of tool and reasoning parsers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_folder, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.engines.vllm.command import read_parser
from mmadmin.core.environments import script, variables
from mmadmin.core.errors import InvalidInput, StepFailed

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "options.py"
OUTPUT = "options.json"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def program_digest() -> str:
    """SHA-256 of the script; a parameter of every step."""
    return hashlib.sha256(PROGRAM.read_bytes()).hexdigest()


class VllmOptionsRecipe:
    """Environment in, its options out."""

    kind = "vllm-options"
    version = 1
    determinism: Determinism = "same-platform"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        fields(params, self.kind, required=("program",))
        text(params, "program", self.kind)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Ask the parser in its own environment."""
        del params
        answer = tools.scratch / OUTPUT
        tools.run(
            script(PROGRAM, str(answer)),
            env={**variables(input_folder(inputs, "environment")), **OFFLINE},
        )
        try:
            table = parse(answer.read_bytes())
            parser = read_parser(table)
        except (OSError, ValueError, InvalidInput) as error:
            raise StepFailed(
                f"vLLM did not say which options it has: {error}", remedy="choose another version"
            ) from error
        (out / OUTPUT).write_bytes(canonical(table))
        tools.log(f"{len({id(one) for one in parser.options.values()})} options")


RECIPE: Recipe = VllmOptionsRecipe()
