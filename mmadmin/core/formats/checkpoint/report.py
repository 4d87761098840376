"""What a checkpoint says about itself, as data; run as a limited child for untrusted files.

`python -m mmadmin.core.formats.checkpoint.report REQUEST ANSWER`: the request names the folder or
one of the checkpoint's files (`{"path": absolute}`) and whether the template's text is wanted
(`"template": true`); the answer is `{"report": …}` or `{"error": {"message", "remedy"}}`. Whatever
goes wrong in here means that the checkpoint is not valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmadmin.core.build.recipe import Json
from mmadmin.core.formats.checkpoint.config import Quantization
from mmadmin.core.formats.checkpoint.model import find_model, read_set, read_template
from mmadmin.core.formats.checkpoint.scales import CacheScales, read_scales
from mmadmin.core.formats.checkpoint.sets import CheckpointSet, file_name
from mmadmin.core.formats.checkpoint.shape import CheckpointShape, module_of, pattern_of
from mmadmin.core.formats.child import answer_requests, answered
from mmadmin.core.formats.protocol import RepoFile

EFFECTS: Mapping[str, str] = {
    "tekken.json": "vLLM takes Mistral's own tokenizer: with images it fails to start, because "
    "[IMG] becomes plain text",
    "params.json": "vLLM reads Mistral's own configuration instead of config.json",
    "generation_config.json": "vLLM takes default sampling parameters from it",
    "chat_template.jinja": "the chat template, before the one of tokenizer_config.json",
    "chat_template.json": "the chat template of a processor, before tokenizer_config.json",
    "preprocessor_config.json": "how images are prepared",
    "processor_config.json": "how images are prepared and which token stands for one",
    "hf_quant_config.json": "vLLM reads a quantisation of ModelOpt from it",
}
"""Files that change what an engine does with the same weights, and how."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")


def report(folder: Path, chosen: CheckpointSet) -> dict[str, Json]:
    """The report of a checkpoint on this disk. Raises `InvalidModel`, `OSError`."""

    def open_file(file: RepoFile) -> Any:
        return (folder / file.path).open("rb")

    shape = read_set(chosen, open_file)
    template = read_template(chosen, open_file)
    scales = read_scales([folder / file.path for file in chosen.weights])
    numbers = shape.config.numbers
    return {
        "architecture": shape.architecture,
        "model_type": shape.model_type,
        "files": len(chosen.weights),
        "size_bytes": sum(file.size_bytes for file in chosen.weights),
        "tensor_count": len(shape.weights),
        "tensor_bytes": shape.weight_bytes,
        "tensor_types": dict(shape.types),
        "tower_bytes": shape.tower_bytes,
        "parameters": shape.parameters,
        "modules": _modules(shape),
        "layers": shape.layers,
        "context_length": shape.context_train,
        "embedding_length": numbers["hidden"],
        "feed_forward_length": numbers["feed_forward"],
        "head_count": numbers["heads"],
        "head_count_kv": numbers["kv_heads"],
        "key_length": numbers["head_size"],
        "vocab_size": numbers["vocabulary"],
        "quantization": _quantization(shape.quantization),
        "cache_scales": _scales(scales),
        "tokenizers": [name for name in TOKENIZERS if name in shape.files],
        "effects": {name: EFFECTS[name] for name in sorted(EFFECTS) if name in shape.files},
        "file_digests": {
            file_name(file.path): _digest(folder / file.path) for file in chosen.beside.values()
        },
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "metadata": {},
    }


def _modules(shape: CheckpointShape) -> dict[str, Json]:
    """Modules by name, `*` for layers: how many, bytes by type, names of their tensors."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in shape.weights:
        module = module_of(tensor.name)
        row = found.setdefault(
            pattern_of(module), {"modules": set(), "bytes": 0, "types": {}, "tensors": set()}
        )
        row["modules"].add(module)
        row["bytes"] += tensor.size
        row["types"][tensor.dtype] = row["types"].get(tensor.dtype, 0) + tensor.size
        row["tensors"].add(tensor.name.rpartition(".")[2])
    return {
        name: {
            "count": len(row["modules"]),
            "bytes": row["bytes"],
            "types": dict(sorted(row["types"].items())),
            "tensors": sorted(row["tensors"]),
        }
        for name, row in sorted(found.items())
    }


def _quantization(found: Quantization | None) -> dict[str, Json] | None:
    if found is None:
        return None
    return {
        "method": found.method,
        "scheme": found.scheme,
        "group_size": found.group_size,
        "cache_type": found.cache_type,
        "ignored": list(found.ignored),
        "static_activations": found.static_activations,
    }


def _scales(scales: CacheScales) -> dict[str, Json]:
    """Counts and the least and the largest of each kind, as text."""
    found: dict[str, Json] = {"problem": scales.problem}
    for which, values in scales.values.items():
        found[which] = {
            "count": len(values),
            "least": f"{min(values.values()):.6g}" if values else "",
            "most": f"{max(values.values()):.6g}" if values else "",
            "values": [f"{value:.6g}" for value in values.values()],
        }
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read(request: Mapping[str, Json]) -> dict[str, Json]:
    """What the child answers."""
    path = Path(str(request["path"]))
    folder, chosen = (path if path.is_dir() else path.parent), find_model(path)
    if request.get("template"):
        return {"template": read_template(chosen, lambda file: (folder / file.path).open("rb"))}
    return {"report": report(folder, chosen)}


def answer(request: Mapping[str, Json]) -> dict[str, Json]:
    """The child's answer; every exception means that the checkpoint is not valid."""
    return answered(read, request)


if __name__ == "__main__":
    answer_requests(read)
