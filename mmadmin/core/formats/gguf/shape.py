"""What a GGUF's header says about the model's shape: layers, heads, windows, experts, weights.

Only the header is needed (metadata and tensor table), so a shape is known before the download.
Keys and defaults are those of llama.cpp b11434: `llama_model_base::load_hparams` (llama-model.cpp)
and the `load_arch_hparams` of each architecture (models/*.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.gguf.header import GgufArray, GgufHeader, Value, check_is_model


class TensorRow(Protocol):
    """One row of a GGUF's tensor table."""

    @property
    def name(self) -> str:
        """`blk.0.attn_q.weight`."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Elements a dimension, the fastest first, as ggml has them."""
        ...

    @property
    def type(self) -> str:
        """`Q4_K`, `F32`."""
        ...

    @property
    def offset(self) -> int:
        """Bytes from the start of the file."""
        ...

    @property
    def size(self) -> int:
        """Bytes of its data."""
        ...


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model, as a value."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int
    file: int = 0
    """Which shard holds it, from 0."""

    @property
    def layer(self) -> int | None:
        """The block it belongs to, or None."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else None

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        total = 1
        for n in self.shape:
            total *= n
        return total


WINDOW_PERIODS: Mapping[str, tuple[int, bool]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma-embedding": (6, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "modern-bert": (3, True),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
"""Architecture → (period, does each period begin with the full layer): `load_swa_pattern`."""
WINDOW_ARRAYS = frozenset({"gemma4", "granite-swa", "mimo2", "step35", "spark2-5", "maple", "lfm2"})
"""Architectures whose file must say which layers have a window."""
WINDOW_DEFAULTS = {"gemma2": 4096, "exaone4": 4096, "exaone-moe": 128, "llama4": 8192}
NO_CACHE = frozenset(
    {"bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert"}
    | {"eurobert", "modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1"}
)
"""Architectures without a KV cache (`llama_model::create_memory`)."""
BERTS = frozenset({"bert", "jina-bert-v3", "nomic-bert-moe"})
RECURRENT_PERIODS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}


LAYER_LIMIT = 4096
"""No model has more layers; a file that says so would cost memory for each."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a model. Per-layer values are tuples over all layers of the file."""

    architecture: str
    layers: int
    """Layers that compute; layers of a draft head are left out."""
    embedding: int
    vocabulary: int
    context_train: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    feed_forward: tuple[int, ...]
    key_length: tuple[int, ...]
    """Per head."""
    value_length: tuple[int, ...]
    window: int = 0
    """Tokens of the sliding window; 0 = none."""
    window_layers: frozenset[int] = frozenset()
    latent: tuple[int, int] | None = None
    """Multi-head latent attention: key and value length of a head after decompression.

    The cache then holds keys only; values are a part of them.
    """
    recurrent_layers: frozenset[int] = frozenset()
    recurrent_state: int = 0
    """Numbers of state a recurrent layer keeps for each sequence."""
    kv_layers: int = 0
    """This many first layers have their own cache; the rest share theirs."""
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    has_cache: bool = True
    pooling: int = 0
    """0 none, 1 mean, 2 first token, 3 last token, 4 rank."""
    causal: bool = True
    weights: tuple[Weight, ...] = ()
    names: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def layers_all(self) -> int:
        """Layers in the file."""
        return len(self.heads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.size for weight in self.weights)

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(weight.elements for weight in self.weights)

    @property
    def ties_output(self) -> bool:
        """True when the token embeddings also serve as the output matrix."""
        return "output.weight" not in self.names and self.architecture not in NO_CACHE

    def weight(self, name: str) -> Weight | None:
        """A tensor by its name."""
        return next((weight for weight in self.weights if weight.name == name), None)

    def has(self, layer: int, part: str) -> bool:
        """True when the file has `blk.<layer>.<part>`."""
        return f"blk.{layer}.{part}" in self.names


def shape_of_headers(headers: Sequence[GgufHeader]) -> ModelShape:
    """The shape by the headers of a model's files, the first one's metadata being the model's."""
    return shape_of(headers[0].metadata, [header.tensors for header in headers])


def shape_of(metadata: Mapping[str, Value], tables: Sequence[Sequence[TensorRow]]) -> ModelShape:
    """The shape by a model's metadata and its tensor table, one table a shard.

    Raises `InvalidModel` when the header lacks what every model must say.
    """
    read = _Reader(metadata)
    arch = check_is_model(metadata, "the file")
    weights = tuple(
        Weight(row.name, tuple(row.shape), row.type, row.offset, row.size, file)
        for file, table in enumerate(tables)
        for row in table
    )
    names = frozenset(weight.name for weight in weights)
    embedding = read.number(f"{arch}.embedding_length")
    total = read.number(f"{arch}.block_count")
    drafts = read.number(f"{arch}.nextn_predict_layers", 0)
    if not 0 <= drafts < total <= LAYER_LIMIT:
        raise InvalidModel(
            f"the model's header says {arch}.block_count = {total}, {drafts} of them for drafts",
            remedy=f"take another file: a model has 1 to {LAYER_LIMIT} layers",
        )
    heads = read.layered(f"{arch}.attention.head_count", total, default=0)
    kv_heads = read.layered(f"{arch}.attention.head_count_kv", total, default=heads)
    head_size = embedding // heads[0] if heads and heads[0] else 0
    windows = _windows(read, arch, total)
    key = read.number(f"{arch}.attention.key_length", head_size)
    value = read.number(f"{arch}.attention.value_length", head_size)
    key_swa = read.number(f"{arch}.attention.key_length_swa", key)
    value_swa = read.number(f"{arch}.attention.value_length_swa", value)
    mla = read.number(f"{arch}.attention.key_length_mla", 0)
    recurrent = _recurrent_layers(read, arch, total, kv_heads)
    return ModelShape(
        architecture=arch,
        layers=total - drafts,
        embedding=embedding,
        vocabulary=_vocabulary(weights, read, arch),
        context_train=read.number(f"{arch}.context_length", 0),
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=read.layered(f"{arch}.feed_forward_length", total, default=0),
        key_length=tuple(key_swa if i in windows[1] else key for i in range(total)),
        value_length=tuple(value_swa if i in windows[1] else value for i in range(total)),
        window=windows[0],
        window_layers=windows[1],
        latent=(mla, read.number(f"{arch}.attention.value_length_mla", value)) if mla else None,
        recurrent_layers=recurrent,
        recurrent_state=_recurrent_state(read, arch, embedding) if recurrent else 0,
        kv_layers=_kv_layers(read, arch, total),
        experts=read.number(f"{arch}.expert_count", 0),
        experts_used=max(read.layered(f"{arch}.expert_used_count", total, default=0), default=0),
        expert_feed_forward=max(
            read.layered(f"{arch}.expert_feed_forward_length", total, default=0), default=0
        ),
        has_cache=arch not in NO_CACHE,
        pooling=read.number(f"{arch}.pooling_type", 0),
        causal=read.flag(f"{arch}.attention.causal", default=arch not in NO_CACHE),
        weights=weights,
        names=names,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    metadata: Mapping[str, Value]

    def number(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key)
        if isinstance(value, GgufArray) and value.values:
            value = value.values[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if default is None:
            raise InvalidModel(f"the model's header has no {key}", remedy="take another file")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.metadata.get(key)
        return value if isinstance(value, bool) else default

    def layered(self, key: str, layers: int, *, default: int | Sequence[int]) -> tuple[int, ...]:
        """A value for every layer, from one number or an array."""
        value = self.metadata.get(key)
        if isinstance(value, GgufArray):
            return tuple(([int(n) for n in value.values] + [0] * layers)[:layers])
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,) * layers
        return (default,) * layers if isinstance(default, int) else tuple(default)


def _windows(read: _Reader, arch: str, layers: int) -> tuple[int, frozenset[int]]:
    """Window size, and the layers that have it."""
    window = read.number(f"{arch}.attention.sliding_window", WINDOW_DEFAULTS.get(arch, 0))
    known = arch in WINDOW_PERIODS or arch in WINDOW_ARRAYS
    if not known or window == 0:
        return 0, frozenset()
    if arch == "llama4":
        window = WINDOW_DEFAULTS["llama4"]
    pattern = read.metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        return window, frozenset(i for i, on in enumerate(pattern.values[:layers]) if on)
    period, full_first = WINDOW_PERIODS.get(arch, (1, False))
    if isinstance(pattern, int):
        period = pattern
    if full_first:
        chosen = frozenset(i for i in range(layers) if period == 0 or i % period)
    else:
        chosen = frozenset(i for i in range(layers) if period == 0 or i % period < period - 1)
    return (window if chosen else 0), chosen


def _kv_layers(read: _Reader, arch: str, layers: int) -> int:
    if arch == "gemma3n":
        return 20
    if arch == "gemma4":
        return layers - read.number("gemma4.attention.shared_kv_layers", 0)
    return layers


def _recurrent_layers(
    read: _Reader, arch: str, layers: int, kv_heads: Sequence[int]
) -> frozenset[int]:
    if arch in RECURRENT_PERIODS:
        period = read.number(f"{arch}.full_attention_interval", RECURRENT_PERIODS[arch])
        return frozenset(i for i in range(layers) if (i + 1) % period)
    if f"{arch}.ssm.state_size" in read.metadata or f"{arch}.shortconv.l_cache" in read.metadata:
        every = arch in {"mamba", "mamba2", "falcon-h1"}
        return frozenset(i for i in range(layers) if every or kv_heads[i] == 0)
    return frozenset()


def _recurrent_state(read: _Reader, arch: str, embedding: int) -> int:
    """`llama_hparams::n_embd_r` + `n_embd_s`: numbers a layer keeps for each sequence."""
    if cache := read.number(f"{arch}.shortconv.l_cache", 0):
        return embedding * (cache - 1)
    conv = max(read.number(f"{arch}.ssm.conv_kernel", 0) - 1, 0)
    inner = read.number(f"{arch}.ssm.inner_size", 0)
    state = read.number(f"{arch}.ssm.state_size", 0)
    groups = read.number(f"{arch}.ssm.group_count", 0)
    return conv * (inner + 2 * groups * state) + state * inner


def _vocabulary(weights: Sequence[Weight], read: _Reader, arch: str) -> int:
    tokens = read.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return tokens.count
    for weight in weights:
        if weight.name == "token_embd.weight" and len(weight.shape) > 1:
            return weight.shape[1]
    return read.number(f"{arch}.vocab_size", 0)
