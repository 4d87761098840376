"""`quantize-gguf`: a model in another quantisation, by the engine's own `llama-quantize`.

inputs: `model`, `engine`. params: `{"file", "type": "Q8_0", "output"}`, and `"requantize": false`
to refuse a model that is quantised already (llama-quantize is told to allow it otherwise). Output:
the one file, read back by a limited child and compared with its source (architecture, tensors,
tokenizer). Same platform: the arithmetic is the CPU's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import (
    at_path,
    fields,
    flag,
    input_file,
    refuse,
    relative_path,
    table,
    text,
)
from mmadmin.core.build.recipe import Determinism, FixedFile, Json, Params, Recipe, Toolbox
from mmadmin.core.engines.llama_server.recipes.merge import engine_program
from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.header import read_header
from mmadmin.core.formats.gguf.shards import find_set, parse_name

PROGRAM = "bin/llama-quantize"
TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M"),
    *("Q4_K_S", "Q4_1", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S", "IQ4_XS"),
    *("IQ4_NL", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "TQ1_0", "TQ2_0", "MXFP4_MOE"),
    "Q2_0",
)
"""What llama-quantize makes without an importance matrix."""
BITS = {"F32": 32, "F16": 16, "BF16": 16, "": 9}
"""Bits a weight by the type's start; block types take at most those of Q8_0."""
TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
SAME = ("architecture", "tensor_count", "layers", "context_length", "vocab_size", "arrays")


class QuantizeGguf:
    """Model in, smaller model out."""

    kind = "quantize-gguf"
    version = 1
    determinism: Determinism = "same-platform"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params with a message."""
        fields(params, self.kind, required=("file", "type", "output"), optional=("requantize",))
        relative_path(text(params, "file", self.kind), "quantize-gguf.file")
        output = relative_path(text(params, "output", self.kind), "quantize-gguf.output")
        if not output.endswith(".gguf") or parse_name(Path(output).name) is not None:
            refuse("quantize-gguf.output", output, "a .gguf name without a shard suffix")
        wanted = text(params, "type", self.kind)
        if wanted not in TYPES:
            refuse("quantize-gguf.type", wanted, f"one of {', '.join(TYPES)}")
        flag(params, "requantize", self.kind, default=True)

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Quantise, then compare what came out with what went in."""
        files = find_set(input_file(inputs, "model", text(params, "file", self.kind)))
        program = engine_program(inputs, PROGRAM)
        before = table(ask(files, tools)["report"], "report")
        tools.reserve(_room(files, text(params, "type", self.kind)))
        scratch = tools.scratch / "quantized.gguf"
        argv = [str(program)]
        if flag(params, "requantize", self.kind, default=True):
            argv.append("--allow-requantize")
        argv += [str(files[0]), str(scratch), text(params, "type", self.kind), str(tools.jobs)]

        def show(line: str) -> None:
            if found := TENSOR_LINE.search(line):
                tools.progress(int(found[1]), int(found[2]), "tensors")

        tools.run(argv, on_line=show)
        after = table(ask([scratch], tools)["report"], "report")
        _compare(before, after)
        scratch.rename(at_path(out, text(params, "output", self.kind)))


def _room(files: Sequence[Path], wanted: str) -> int:
    """Bytes that the result may take: the largest block type of the kind, for every weight."""
    headers = [read_header(file) for file in files]
    weights = sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors)
    bits = next(bits for start, bits in BITS.items() if wanted.startswith(start))
    return weights * bits // 8 + sum(header.header_size for header in headers)


def _compare(before: Mapping[str, Json], after: Mapping[str, Json]) -> None:
    for name in SAME:
        if before[name] != after[name]:
            raise InvalidModel(
                f"the quantised model's {name} is {after[name]}, its source's {before[name]}",
                remedy="the quantisation went wrong: build again, or take another engine build",
            )


RECIPE: Recipe = QuantizeGguf()
