"""`config.json` and the other small JSON files of a checkpoint, read as untrusted data.

Names differ between architectures; a model of text and images keeps the text part in a table of its
own (`text_config`). Sources: transformers' configuration classes, compressed-tensors'
`QuantizationConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmadmin.core.errors import InvalidModel

MAX_BYTES = 32 << 20
"""Of one JSON file; tokenizers of half a million merges are below."""
MAX_LAYERS = 4096
TEXT_TABLES = ("text_config", "llm_config", "language_config")
NAMES: Mapping[str, Sequence[str]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "feed_forward": ("intermediate_size", "ffn_dim", "n_inner"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
}
"""What is read of the text part → its names."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint says about how it is quantised."""

    method: str
    """`compressed-tensors`, `fp8`, `awq`, `gptq`, `modelopt` …"""
    scheme: str = ""
    """`w8a8-fp8`, `w4a16`, `nvfp4`, `nvfp4a16`; empty = not known."""
    group_size: int = 0
    """0 = none."""
    cache_type: str = ""
    """`fp8` where it carries scales for the K/V cache."""
    ignored: tuple[str, ...] = ()
    """Patterns of modules that are not quantised."""
    static_activations: bool = False
    """True where one activation scale was calibrated for all inputs."""

    @property
    def label(self) -> str:
        """Method and scheme, for people."""
        cache = f", {self.cache_type} K/V cache" if self.cache_type else ""
        return f"{self.method}{f' {self.scheme}' if self.scheme else ''}{cache}"


@dataclass(frozen=True, slots=True)
class Config:
    """The dimensions and kind of a model."""

    architecture: str
    model_type: str
    numbers: Mapping[str, int]
    """By the keys of `NAMES`; 0 = not said."""
    quantization: Quantization | None = None
    ties_output: bool = False
    has_vision: bool = False


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON table from a file. Raises `InvalidModel`."""
    if len(data) > MAX_BYTES:
        raise InvalidModel(
            f"{name} has {len(data):,} bytes", remedy=f"a sound one is below {MAX_BYTES >> 20} MiB"
        )
    try:
        table = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(
            f"{name} is not valid JSON ({str(error)[:100]})", remedy="fetch it again", file=name
        ) from error
    if not isinstance(table, dict):
        raise InvalidModel(f"{name} is not a table", remedy="fetch it again", file=name)
    return table


def read_config(table: Mapping[str, Any]) -> Config:
    """A `config.json`. Raises `InvalidModel` where it does not describe a language model."""
    text = next((table[n] for n in TEXT_TABLES if isinstance(table.get(n), dict)), table)
    names = table.get("architectures") or text.get("architectures") or []
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    model_type = str(table.get("model_type") or "")
    if not architecture and not model_type:
        raise InvalidModel(
            "config.json names no architecture", remedy="this is not a model that an engine loads"
        )
    numbers = {key: _first(text, keys) for key, keys in NAMES.items()}
    if not 0 < numbers["layers"] <= MAX_LAYERS:
        raise InvalidModel(
            f"config.json says that the model has {numbers['layers']} layers",
            remedy=f"take another model: one has 1 to {MAX_LAYERS}",
        )
    numbers["kv_heads"] = numbers["kv_heads"] or numbers["heads"]
    if not numbers["head_size"] and numbers["heads"]:
        numbers["head_size"] = numbers["hidden"] // numbers["heads"]
    return Config(
        architecture=architecture[:200],
        model_type=model_type[:200],
        numbers=numbers,
        quantization=_quantization(table, text),
        ties_output=bool(table.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        has_vision=isinstance(table.get("vision_config"), dict),
    )


def _first(table: Mapping[str, Any], names: Sequence[str]) -> int:
    for name in names:
        value = table.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            return value
    return 0


def _quantization(*tables: Mapping[str, Any]) -> Quantization | None:
    for table in tables:
        for name in ("quantization_config", "compression_config"):
            found = table.get(name)
            if isinstance(found, dict) and found:
                return quantization_of(found)
    return None


def quantization_of(table: Mapping[str, Any]) -> Quantization:
    """A `quantization_config` table."""
    method = str(table.get("quant_method") or table.get("quant_algo") or "unknown")[:80]
    group = _first_group(table)
    weights = _table(group, "weights")
    inputs = _table(group, "input_activations")
    ignored = table.get("ignore") or table.get("modules_to_not_convert") or []
    activations = str(table.get("activation_scheme") or "")
    return Quantization(
        method=method,
        scheme=_scheme(method, table, weights, inputs),
        group_size=_first({**table, **weights}, ("group_size", "q_group_size")),
        cache_type=_cache_type(table.get("kv_cache_scheme")),
        ignored=tuple(str(one) for one in ignored) if isinstance(ignored, list) else (),
        static_activations=activations == "static"
        or (bool(inputs) and inputs.get("dynamic") is False),
    )


def _table(table: Any, name: str) -> Mapping[str, Any]:
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, dict) else {}


def _cache_type(scheme: Any) -> str:
    if not isinstance(scheme, dict):
        return ""
    return f"{'fp' if scheme.get('type') == 'float' else 'int'}{scheme.get('num_bits')}"


def _scheme(
    method: str,
    table: Mapping[str, Any],
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> str:
    bits = weights.get("num_bits") or table.get("bits") or table.get("w_bit")
    if method == "fp8":
        return "w8a8-fp8"
    if weights.get("type") == "float" and bits == 8:  # noqa: PLR2004 (bits of a weight)
        return "w8a8-fp8" if inputs else "w8a16-fp8"
    if "nvfp4" in str(table.get("format") or _first_group(table).get("format")).lower():
        return "nvfp4" if inputs else "nvfp4a16"
    if isinstance(bits, int):
        return f"w{bits}a{inputs.get('num_bits') or 16}"
    return ""


def _first_group(table: Mapping[str, Any]) -> Mapping[str, Any]:
    groups: Any = table.get("config_groups")
    return (
        _table({"group": next(iter(groups.values()), None)}, "group")
        if isinstance(groups, dict)
        else {}
    )
