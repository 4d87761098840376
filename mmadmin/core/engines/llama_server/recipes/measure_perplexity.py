"""`measure-perplexity`: how well a GGUF model predicts a text, by the engine's `llama-perplexity`.

inputs: `model`, `engine` (with `bin/llama-perplexity`), `text`. params: `{"file", "text",
"context": 512}`, and `chunks` (0 = the whole text). Output: `report.json`, read by
`mmadmin.core.evaluation.text.read_report`. The model runs on the CPU.

The text is cut into chunks of `context` tokens. In each, the second half is predicted. After each
chunk the program prints the mean negative log-likelihood (NLL, in nats per token) of all chunks so
far, with six decimals; the report keeps these, and the program's final estimate, as printed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import fields, input_file, number, refuse, relative_path, table, text
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.canonical import canonical, digest
from mmadmin.core.engines.llama_server.recipes.merge import engine_program
from mmadmin.core.errors import StepFailed
from mmadmin.core.evaluation.text import CONTEXTS, REPORT
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.shards import find_set

PROGRAM = "bin/llama-perplexity"
COUNT = re.compile(r"calculating perplexity over (\d+) chunks")
CHUNK = re.compile(r"^\s*\d+  \d+\.\d{4}  (-?\d+\.\d{6})  \d+\.\d{6}$")
FINAL = re.compile(r"Final estimate: PPL = (\d+\.\d{4}) \+/- (\d+\.\d{5})")
TOKENIZER_DOMAIN = "mmadmin-gguf-tokenizer-v1"


class _Output:
    """Reads the program's lines."""

    def __init__(self, tools: Toolbox) -> None:
        self.tools = tools
        self.count = 0
        self.means: list[str] = []
        self.final: tuple[str, str] | None = None

    def __call__(self, line: str) -> None:
        if found := COUNT.search(line):
            self.count = int(found[1])
        elif found := CHUNK.search(line):
            self.means.append(found[1])
            self.tools.progress(len(self.means), self.count, "chunks")
        elif found := FINAL.search(line):
            self.final = found[1], found[2]


class MeasurePerplexity:
    """Model and text in, report out."""

    kind = "measure-perplexity"
    version = 1
    determinism: Determinism = "none"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, required=("file", "text", "context"), optional=("chunks",))
        for name in ("file", "text"):
            relative_path(text(params, name, self.kind), f"{self.kind}.{name}")
        context = number(params, "context", self.kind)
        if context not in CONTEXTS:
            refuse(f"{self.kind}.context", context, f"one of {', '.join(map(str, CONTEXTS))}")
        number(params, "chunks", self.kind, 0)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Read the model's header, run the program, keep what it printed."""
        model = input_file(inputs, "model", text(params, "file", self.kind))
        corpus = input_file(inputs, "text", text(params, "text", self.kind))
        program = engine_program(inputs, PROGRAM)
        context = number(params, "context", self.kind)
        chunks = number(params, "chunks", self.kind, 0)
        header = table(ask(find_set(model), tools)["report"], "report")
        output = _Output(tools)
        argv = [str(program), "-m", str(model), "-f", str(corpus), "-c", str(context)]
        argv += ["--ppl-output-type", "1", "-ngl", "0", "-t", str(tools.jobs)]
        tools.run([*argv, *(("--chunks", str(chunks)) if chunks else ())], on_line=output)
        if output.final is None or len(output.means) != output.count:
            raise StepFailed(
                "llama-perplexity gave no estimate",
                remedy=f"its log says why; a text needs at least {2 * context} tokens",
                exit_code=0,
                log_tail=[],
            )
        with corpus.open("rb") as file:
            text_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        perplexity, standard_error = output.final
        report: dict[str, Json] = {
            "format": 1,
            "text_sha256": text_sha256,
            "tokenizer": digest(TOKENIZER_DOMAIN, _tokenizer(header)),
            "context": context,
            "perplexity": perplexity,
            "standard_error": standard_error,
            "running_nll": [*output.means],
        }
        (out / REPORT).write_bytes(canonical(report))


def _tokenizer(header: Mapping[str, Json]) -> Json:
    """The header's keys that decide how a text becomes tokens; the chat template does not."""
    return {
        key: value
        for part in ("metadata", "array_digests")
        for key, value in table(header[part], part).items()
        if key.startswith("tokenizer.ggml.")
    }


RECIPE: Recipe = MeasurePerplexity()
