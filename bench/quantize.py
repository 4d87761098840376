"""How long quantising a checkpoint takes on this host's GPU: `make bench-quantize`.

Layers of Mistral Medium 3.5's width are quantised by our own recipe, proof included, with two
amounts of calibration data. A straight line through the two gives the time of all 88 layers at the
512 x 8192 tokens that the published recipe calibrates with. `--environment` names an environment
object (or any folder with a `site`) that holds llm-compressor.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.build.recipe import Json, LineHook
from mmadmin.core.environments import script, variables
from mmadmin.core.formats.checkpoint.recipes.quantize_checkpoint import (
    RECIPE,
    program_digest,
    read_params,
)

MAKER = Path(__file__).with_name("wide_checkpoint.py")
LAYERS = 88
SEED_TOKENS = 512 * 8192
GIB = 1 << 30
ANSWER = "quantize-answer.json"
LAYER = re.compile(r"layer \d+ of \d+: ")


@dataclass
class Bare:
    """What the recipe needs of a toolbox: programs run as they are, outside the sandbox."""

    scratch: Path
    lines: list[tuple[float, str]] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: LineHook | None = None,
    ) -> None:
        """Run to the end; its lines with the moment of each."""
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.scratch), **(env or {})}
        with subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout is not None  # asked for
            for line in child.stdout:
                self.log(line.rstrip())
                if on_line is not None:
                    on_line(line)
        if child.returncode:
            raise SystemExit("\n".join(text for _, text in self.lines[-40:]))

    def log(self, line: str) -> None:
        """Keep it."""
        self.lines.append((time.monotonic(), line))

    def progress(self, done: int, total: int, unit: str) -> None:
        """The lines say it."""

    def reserve(self, size_bytes: int) -> None:
        """Nobody else builds here."""


@dataclass(frozen=True)
class Took:
    """One run."""

    name: str
    tokens: int
    """Calibration tokens; 0 = none."""
    layer_s: float
    prove_s: float
    """From the end of the tool to the end of the recipe."""
    gpu_bytes: int


def params(made: Path, scheme: str, data: dict[str, Json] | None) -> dict[str, Json]:
    """A step's parameters."""
    weights = (made / "model").glob("*.safetensors")
    return {
        "scheme": scheme,
        "dequantize": False,
        "ignore": [],
        "cache_scales": data is not None,
        "group_size": 128 if scheme == "W4A16" else 0,
        "dampening": "0.01",
        "calibration": data,
        "device": "cuda",
        "program": program_digest(),
        "source_bytes": sum(file.stat().st_size for file in weights),
    }


def quantize(made: Path, environment: Path, work: Path, wanted: Mapping[str, Json]) -> Took:
    """One run of the recipe."""
    out, scratch = work / "out", work / "scratch"
    out.mkdir(parents=True)
    scratch.mkdir()
    inputs = {"model": made / "model", "environment": environment, "calibration": made / "data"}
    tools = Bare(scratch)
    began = time.monotonic()
    RECIPE.build(wanted, inputs, out, tools)  # type: ignore[arg-type]
    whole_s = time.monotonic() - began
    answer = json.loads((scratch / ANSWER).read_bytes())
    times = [at for at, line in tools.lines if LAYER.match(line)]
    started = next(at for at, line in tools.lines if line.startswith("starting "))
    layers = text_layers(made)
    each_s = ((times[-1] - started) if times else answer["quantize_s"]) / layers
    tool_s = sum(answer[part] for part in ("load_s", "quantize_s", "save_s"))
    data = wanted["calibration"]
    tokens = int(str(data["samples"])) * int(str(data["tokens"])) if isinstance(data, dict) else 0
    return Took(str(wanted["scheme"]), tokens, each_s, whole_s - tool_s, answer["peak_bytes"])


def text_layers(made: Path) -> int:
    """Text layers of the checkpoint."""
    config = json.loads((made / "model" / "config.json").read_bytes())
    return int(config["text_config"]["num_hidden_layers"])


def main() -> int:
    """Make the layers, quantise them three times, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, nargs=2, default=(16, 64))
    parser.add_argument("--tokens", type=int, default=2048, help="of each sample")
    asked = parser.parse_args()
    rows: list[Took] = []
    with tempfile.TemporaryDirectory(prefix="mm-quantize-") as folder:
        made = Path(folder) / "made"
        argv = script(MAKER, str(made), str(asked.layers))
        subprocess.run(argv, env={**variables(asked.environment)}, check=True)
        runs = [params(made, "FP8_DYNAMIC", None)]
        for samples in asked.samples:
            data: dict[str, Json] = {
                "column": "text",
                "language": "",
                "length": "full",
                "seed": 42,
                "samples": samples,
                "tokens": asked.tokens,
            }
            runs.append(params(made, "W4A16", data))
        for n, wanted in enumerate(runs):
            took = quantize(made, asked.environment, Path(folder) / f"run-{n}", wanted)
            rows.append(took)
            say(
                f"{took.name:12} {took.tokens:>8} tokens {took.layer_s:8.2f} s a layer "
                f"{took.gpu_bytes / GIB:7.1f} GiB of GPU memory, {took.prove_s:.0f} s to prove"
            )
        reserved = read_params(runs[0]).memory_bytes
    few, many = rows[1], rows[2]
    slope = (many.layer_s - few.layer_s) / (many.tokens - few.tokens)
    layer_s = few.layer_s + slope * (SEED_TOKENS - few.tokens)
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    say(f"main memory: {reserved / GIB:.1f} GiB reserved, {held / GIB:.1f} GiB held")
    say(
        f"bench-quantize: {LAYERS} layers FP8_DYNAMIC {rows[0].layer_s * LAYERS / 60:.1f} min, "
        f"W4A16 with fp8 K/V at {SEED_TOKENS} tokens {layer_s * LAYERS / 3600:.1f} h"
    )
    return 0


def say(line: str) -> None:
    """A line of the table."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
