"""`quantize-checkpoint`: a checkpoint in, a smaller one out, by llm-compressor; proved.

inputs: `model` (a checkpoint), `environment` (llm-compressor, see `python-env`), and where the
scheme or the K/V scales need data `calibration` (its files). params: `scheme`, `dequantize`,
`ignore`, `cache_scales`, `group_size`, `dampening`, `calibration` (`column`, `language`, `length`,
`samples`, `tokens`, `seed`; null = none), `device`, `program` (digest of the script) and
`source_bytes`.

Output: weights, `config.json` with the quantisation, the source's other files byte for byte, and
`README.md`, which says how it was made. The script runs in the sandbox; its output is an object
only after `mmadmin.core.formats.checkpoint.proof`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mmadmin.core.build.params import fields, flag, input_folder, number, refuse, table, text, texts
from mmadmin.core.build.recipe import (
    Determinism,
    FixedFile,
    Json,
    Params,
    Recipe,
    Requirements,
    Toolbox,
)
from mmadmin.core.environments import script, variables
from mmadmin.core.errors import InvalidModel, StepFailed
from mmadmin.core.formats.checkpoint.config import parse_json
from mmadmin.core.formats.checkpoint.model import find_model, read_model
from mmadmin.core.formats.checkpoint.proof import final_config, prove, tokenizer_files
from mmadmin.core.formats.checkpoint.quantized import Targets, quantized, targets_of
from mmadmin.core.formats.checkpoint.schemes import SCHEMES, Scheme
from mmadmin.core.formats.checkpoint.sets import CONFIG

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "quantize.py"
LAYER = re.compile(r"layer (\d+) of (\d+): ")
"""How the script says how far it is."""
LONGEST_S = 72 * 3600
"""The largest models take 14 hours."""
OVERHEAD_BYTES = 6 << 30
"""Main memory besides the model: the environment, one layer's data. On a GPU 5.2 GiB were held."""
DATA = ("column", "language", "length", "samples", "tokens", "seed")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def program_digest() -> str:
    """SHA-256 of the script; a parameter of every step."""
    return hashlib.sha256(PROGRAM.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of a step."""

    scheme: Scheme
    dequantize: bool
    ignore: Sequence[str]
    cache_scales: bool
    group_size: int
    dampening: str
    calibration: Mapping[str, Json] | None
    device: str
    source_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Main memory for the whole model in BF16."""
        return self.source_bytes * (2 if self.dequantize else 1) * 21 // 20 + OVERHEAD_BYTES


def read_params(params: Params) -> Request:
    """Check parameters. Raises `InvalidDerivation`."""
    where = "quantize-checkpoint"
    names = ("scheme", "dequantize", "ignore", "cache_scales", "group_size", "dampening")
    fields(
        params,
        where,
        required=(*names, "calibration", "device", "program", "source_bytes"),
    )
    scheme = SCHEMES.get(text(params, "scheme", where))
    if scheme is None:
        refuse(f"{where}.scheme", params["scheme"], f"one of {', '.join(SCHEMES)}")
    device = text(params, "device", where)
    if device not in ("cpu", "cuda"):
        refuse(f"{where}.device", device, '"cpu" or "cuda"')
    text(params, "program", where)
    data = params["calibration"]
    if data is not None:
        wanted = table(data, f"{where}.calibration")
        fields(wanted, f"{where}.calibration", required=DATA)
        for name in ("samples", "tokens", "seed"):
            number(wanted, name, f"{where}.calibration")
    cache_scales = flag(params, "cache_scales", where, default=False)
    if (data is None) == (scheme.needs_data or cache_scales):
        refuse(f"{where}.calibration", data, "data where the scheme or the K/V scales need it")
    return Request(
        scheme,
        flag(params, "dequantize", where, default=False),
        texts(params, "ignore", where),
        cache_scales,
        number(params, "group_size", where),
        text(params, "dampening", where),
        cast("Mapping[str, Json] | None", data),
        device,
        number(params, "source_bytes", where),
    )


class QuantizeCheckpoint:
    """Checkpoint in, quantised checkpoint out."""

    kind = "quantize-checkpoint"
    version = 1
    determinism: Determinism = "same-platform"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        read_params(params)

    def requires(self, params: Params) -> Requirements:
        """Main memory for the model in BF16, and one GPU where there are any."""
        request = read_params(params)
        return Requirements(
            gpus=int(request.device == "cuda"),
            memory_bytes=request.memory_bytes,
            time_s=LONGEST_S,
        )

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:
        """Not known beforehand."""
        del params
        return None

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Quantise, prove what came out, and put it together with the source's other files."""
        request, source = read_params(params), input_folder(inputs, "model")
        shape, chosen = read_model(source), find_model(source)
        targets = targets_of(shape, request.ignore)
        expected = quantized(shape, request)
        for pattern, count in targets.matched.items():
            tools.log(f"ignore {pattern}: {count} modules")
        tools.log(targets.message)
        tools.reserve(expected.weight_bytes)
        made = tools.scratch / "quantized"
        asked: dict[str, Json] = {
            "task": "quantize",
            "source": str(source),
            "output": str(made),
            "scheme": request.scheme.name,
            "dequantize": request.dequantize,
            "targets": list(targets.chosen),
            "cache_scales": request.cache_scales,
            "group_size": request.group_size,
            "dampening": request.dampening,
            "calibration": dict(request.calibration) if request.calibration else None,
            "files": _data_files(inputs) if request.calibration else [],
            "seed": (request.calibration or {}).get("seed", 0),
        }
        _run(asked, inputs, tools)
        _finish(made, source, params, shape_of=(shape, targets), tools=tools)
        prove(made, source, request, expected, tools.log)
        for name in tokenizer_files(chosen):
            shutil.copyfile(source / name, made / name)
        _check_loads(made, inputs, tools)
        for file in sorted(made.iterdir()):
            file.rename(out / file.name)


def _data_files(inputs: Mapping[str, Path]) -> list[Json]:
    folder = input_folder(inputs, "calibration")
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _run(asked: Mapping[str, Json], inputs: Mapping[str, Path], tools: Toolbox) -> dict[str, Any]:
    """The script's answer. Raises `StepFailed`."""
    request = tools.scratch / f"{asked['task']}.json"
    answer = tools.scratch / f"{asked['task']}-answer.json"
    request.write_text(json.dumps(asked), encoding="utf-8")

    def show(line: str) -> None:
        if found := LAYER.match(line):
            tools.progress(int(found[1]), int(found[2]), "layers")

    tools.run(
        script(PROGRAM, str(request), str(answer)),
        env={
            **variables(input_folder(inputs, "environment")),
            **OFFLINE,
            # environments hold no bytecode: compiled once for both runs of the script
            "PYTHONPYCACHEPREFIX": str(tools.scratch / "bytecode"),
        },
        on_line=show,
    )
    found: dict[str, Any] = json.loads(answer.read_bytes())
    if "refused" in found:
        raise StepFailed(str(found["refused"]), remedy="change the deployment's [model] table")
    return found


def _finish(
    made: Path, source: Path, params: Params, *, shape_of: tuple[Any, Targets], tools: Toolbox
) -> None:
    """Write the final configuration and the model card; drop what the tool wrote besides."""
    own = {CONFIG, "model.safetensors.index.json"}
    written = parse_json((made / CONFIG).read_bytes(), CONFIG)
    for file in made.iterdir():
        if file.name not in own and file.suffix != ".safetensors":
            tools.log(f"{file.name} is taken from the source instead")
            file.unlink()
    plain = parse_json((source / CONFIG).read_bytes(), CONFIG)
    config = final_config(plain, written, *shape_of)
    if "quantization_config" not in written:
        config.pop("quantization_config")
    (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (made / "README.md").write_text(model_card(params, shape_of[1]), encoding="utf-8")


def _check_loads(made: Path, inputs: Mapping[str, Path], tools: Toolbox) -> None:
    """Load the finished checkpoint once: every name must be taken."""
    tools.log("loading the quantised checkpoint to check its names")
    found = _run({"task": "reload", "source": str(made)}, inputs, tools)
    for problem, names in found.items():
        if names:
            raise InvalidModel(
                f"the quantised checkpoint does not load whole: {len(names)} "
                f"{problem.replace('_', ' ')}, {', '.join(names[:3])}",
                remedy="the object is not made; build again with another version of the quantizer",
                names=names[:100],
            )


def model_card(params: Params, targets: Targets) -> str:
    """How the checkpoint was made, for whoever gets it by itself."""
    rows = {k: v for k, v in params.items() if k not in ("program", "source_bytes", "calibration")}
    data = params.get("calibration")
    if isinstance(data, dict):
        rows |= {f"calibration.{name}": value for name, value in data.items()}
    lines = [f"| {name} | {json.dumps(value)} |" for name, value in sorted(rows.items())]
    text_lines = [
        "# A quantised checkpoint",
        "",
        f"Made by mmadmin with llm-compressor: {targets.message}.",
        "Everything else is the source's, bit for bit.",
        "",
        "| parameter | value |",
        "|---|---|",
        *lines,
    ]
    return "\n".join(text_lines) + "\n"


RECIPE: Recipe = QuantizeCheckpoint()
