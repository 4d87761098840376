"""The worst-case graphs that llama.cpp reserves memory for, as shapes.

`worst_case` builds the graph of one prompt batch: nodes in the order in which llama.cpp asks for
them, since the allocator's peak depends on it. Decoders differ in which tensors a layer has, so
one builder follows what the file holds; encoders without a cache have their own.

Sources (llama.cpp b11434): `build_inp_embd`, `build_qkv`, `build_attn`, `build_attn_mha`,
`build_ffn`, `build_moe_ffn`, `build_pooling` (llama-graph.cpp); `cpy_k`, `get_k` and their twins
(llama-kv-cache.cpp); the graphs of llama, mistral3, qwen2, qwen3, qwen3moe, gemma3, deepseek2,
openai-moe and bert (models/*.cpp). Architectures with other blocks are approximated by the
nearest of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmadmin.core.engines.llama_server.graph_memory import Graph, Tensor
from mmadmin.core.formats.gguf.shape import BERTS, ModelShape

F16 = 2
I64 = 8
ROTATION = 64
"""The least size of the rotation of a quantized cache."""
NO_MIXED_BATCH = frozenset(
    {"cogvlm", "deepseek4", "granite-switch", "eagle3", "dflash", "gemma4-assistant"}
)
"""`llm_arch_supports_mixed_batch`."""
LAYERS_A_DEVICE = 14
"""So many layers of a device are built: the allocator repeats itself from one period of layers to
the next, and no period of windows is longer than half of this."""
LATE_OUTPUTS = frozenset({"gpt-oss"})
"""Architectures that pick the wanted rows after the last layer, not within it."""
SCALED_EMBEDDINGS = frozenset({"gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma-embedding"})


@dataclass(frozen=True, slots=True)
class Batch:
    """One prompt batch and the caches it sees."""

    tokens: int
    sequences: int
    outputs: int
    streams: int
    """1 when the slots share one cache, else the number of slots."""
    cells: int
    """Cache cells a stream."""
    window_cells: int
    """The same for layers with a sliding window."""
    flash_attention: bool
    embeddings: bool
    pooling: int
    quantized_keys: bool = False
    quantized_values: bool = False
    """A quantized cache is rotated before it is stored, and GPUs convert it back to half."""


@dataclass(slots=True)
class _Inputs:
    """The tensors that are filled before each batch."""

    positions: Tensor
    outputs: Tensor
    mask: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    mask_swa: Tensor | None = None
    keys_swa: Tensor | None = None
    values_swa: Tensor | None = None
    rotate_keys: Tensor | None = None
    rotate_values: Tensor | None = None


def worst_case(shape: ModelShape, batch: Batch, devices: Mapping[int, int]) -> Graph:
    """The graph of `batch`; `devices[layer]` computes a layer, `devices[layers]` the output.

    Device -1 is the host.
    """
    builder = _Builder(shape, batch, devices)
    if shape.architecture in BERTS:
        builder.encoder()
    else:
        builder.decoder()
    return builder.graph


def built_layers(layers: int, devices: Mapping[int, int]) -> list[int]:
    """The layers whose graph decides the peak: the first of each device, and the last."""
    seen: dict[int, int] = {}
    chosen = []
    for layer in range(layers):
        count = seen[devices[layer]] = seen.get(devices[layer], 0) + 1
        if count <= LAYERS_A_DEVICE or layer == layers - 1:
            chosen.append(layer)
    return chosen


class _Builder:
    def __init__(self, shape: ModelShape, batch: Batch, devices: Mapping[int, int]) -> None:
        self.shape = shape
        self.batch = batch
        self.devices = devices
        self.graph = Graph(device=-1)
        self.layers = built_layers(shape.layers, devices)

    # -- inputs

    def embeddings(self) -> Tensor:
        """`build_inp_embd`: the token, the vector and the mixed path; only the first is used."""
        graph, shape, tokens = self.graph, self.shape, self.batch.tokens
        table = graph.weight(shape.embedding, shape.vocabulary)
        picked = graph.new("get_rows", (shape.embedding, tokens), table, graph.input(tokens))
        vectors = graph.input(shape.embedding, tokens)
        graph.expand(picked)
        graph.expand(vectors)
        host = graph.device
        if shape.architecture not in NO_MIXED_BATCH:
            # without weights of their own, these are computed where the first layer is
            vectors, graph.device = graph.input(shape.embedding, tokens), self.devices[0]
            mixed = graph.like("dup", vectors)
            graph.device = host
            rows = graph.new("get_rows", (shape.embedding, tokens), table, graph.input(tokens))
            slots = graph.input(tokens, element_bytes=I64)
            graph.device = self.devices[0]
            graph.expand(self.set_rows(mixed, rows, slots))
        graph.device = self.devices[0]
        if shape.architecture in SCALED_EMBEDDINGS:
            picked = graph.like("mul", picked, graph.input(1, tokens))
        graph.expand(picked)
        graph.device = host
        return picked

    def set_rows(self, target: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        """`ggml_set_rows`: a view of its target that depends on what is written."""
        node = self.graph.view(target, target.shape)
        node.op = "set_rows"
        node.sources = (rows, indices, target)
        return node

    def inputs(self) -> _Inputs:
        graph, batch, shape = self.graph, self.batch, self.shape
        found = _Inputs(graph.input(batch.tokens), graph.input(batch.outputs), self.mask(0))
        if shape.has_cache:
            found.keys, found.values = self.indices()
            found.mask = self.mask(batch.cells)
            if shape.window_layers:
                found.keys_swa, found.values_swa = self.indices()
                found.mask_swa = self.mask(batch.window_cells)
            found.rotate_keys = self.rotation(shape.key_length, quantized=batch.quantized_keys)
            found.rotate_values = self.rotation(
                shape.value_length, quantized=batch.quantized_values, smallest=True
            )
        elif shape.window_layers:
            found.mask_swa = self.mask(0)
        return found

    def rotation(
        self, lengths: Sequence[int], *, quantized: bool, smallest: bool = False
    ) -> Tensor | None:
        """The Hadamard matrix of a quantized cache (`llama_kv_cache`'s constructor)."""
        if not quantized or len(set(lengths)) != 1 or lengths[0] % ROTATION:
            return None
        size = ROTATION
        while not smallest and lengths[0] % (2 * size) == 0:
            size *= 2
        return self.graph.input(size, size)

    def rotated(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        """`llama_mul_mat_hadamard`."""
        if matrix is None:
            return x
        graph, size = self.graph, matrix.shape[0]
        flat = graph.view(x, (size, x.shape[0] * x.shape[1] * x.shape[2] // size))
        return graph.view(graph.new("mul_mat", flat.shape, matrix, flat), x.shape)

    def mask(self, cells: int) -> Tensor:
        batch = self.batch
        size = F16 if batch.flash_attention else 4
        if cells == 0:
            return self.graph.input(batch.tokens, batch.tokens, element_bytes=size)
        per_stream = batch.tokens // batch.streams
        return self.graph.input(cells, per_stream, 1, batch.streams, element_bytes=size)

    def indices(self) -> tuple[Tensor, Tensor]:
        tokens = self.batch.tokens
        width = max(
            heads * size
            for heads, size in zip(self.shape.kv_heads, self.shape.value_length, strict=True)
        )
        values = tokens if self.batch.flash_attention else tokens * width
        return (
            self.graph.input(tokens, element_bytes=I64),
            self.graph.input(values, element_bytes=I64),
        )

    # -- blocks

    def norm(self, x: Tensor, *, kind: str = "rms_norm", bias: bool = False) -> Tensor:
        graph = self.graph
        out = graph.like("mul", graph.like(kind, x), graph.weight(x.shape[0]))
        return graph.like("add", out, graph.weight(x.shape[0])) if bias else out

    def linear(self, x: Tensor, rows: int, *, bias: bool = False) -> Tensor:
        out = self.graph.mul_mat(self.graph.weight(x.shape[0], rows), x)
        return self.graph.like("add", out, self.graph.weight(rows)) if bias else out

    def qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """`build_qkv`: one fused matrix, or three."""
        graph, shape, tokens = self.graph, self.shape, self.batch.tokens
        heads, kv_heads = shape.heads[layer], shape.kv_heads[layer]
        key, value = shape.key_length[layer], shape.value_length[layer]
        sizes = ((key, heads), (key, kv_heads), (value, kv_heads))
        if shape.has(layer, "attn_qkv.weight"):
            width = sum(size * count for size, count in sizes)
            fused = self.linear(x, width, bias=shape.has(layer, "attn_qkv.bias"))
            row = fused.strides[1]
            parts = [
                graph.view(fused, (size, count, tokens, 1), (4, 4 * size, row, row * tokens))
                for size, count in sizes
            ]
            return parts[0], parts[1], parts[2]
        made = []
        for part, (size, count) in zip(("attn_q", "attn_k", "attn_v"), sizes, strict=True):
            flat = self.linear(x, size * count, bias=shape.has(layer, f"{part}.bias"))
            made.append(graph.view(flat, (size, count, tokens)))
        return made[0], made[1], made[2]

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.graph.like("rope", x, positions)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int, inputs: _Inputs) -> Tensor:
        """`build_attn`: store into the cache, attend, project back."""
        graph, shape, batch = self.graph, self.shape, self.batch
        windowed = layer in shape.window_layers
        q, k = self.rotated(q, inputs.rotate_keys), self.rotated(k, inputs.rotate_keys)
        v = self.rotated(v, inputs.rotate_values)
        order = (q, k, v) if shape.window_layers or not shape.has_cache else (q, v, k)
        for tensor in order:
            graph.expand(tensor)
        mask = inputs.mask_swa if windowed and inputs.mask_swa else inputs.mask
        if shape.has_cache:
            cells = batch.window_cells if windowed else batch.cells
            keys = inputs.keys_swa if windowed else inputs.keys
            values = inputs.values_swa if windowed else inputs.values
            k = self.cached(k, keys, cells)
            v = self.cached(v, values, cells, transposed=not batch.flash_attention)
        out = self.rotated(self.attend(q, k, v, mask), inputs.rotate_values)
        return self.linear(out, shape.embedding, bias=shape.has(layer, "attn_output.bias"))

    def latent_attention(self, x: Tensor, layer: int, inputs: _Inputs) -> Tensor:
        """Multi-head latent attention with absorbed matrices (deepseek2.cpp)."""
        graph, shape, batch = self.graph, self.shape, self.batch
        tokens, heads = batch.tokens, shape.heads[layer]
        key, value = shape.latent or (0, 0)
        rank = shape.value_length[layer]
        roped = shape.key_length[layer] - rank
        q = x
        if low := shape.weight(f"blk.{layer}.attn_q_a.weight"):
            q = self.norm(self.linear(q, low.shape[1]))
        q = graph.view(self.linear(q, key * heads), (key, heads, tokens))
        both = self.linear(x, rank + roped)
        row = both.strides[1]
        k_pe = graph.view(both, (roped, 1, tokens, 1), (4, row, row, row * tokens))
        k_pe = self.rope(k_pe, inputs.positions)
        packed = graph.view(both, (rank, tokens, 1, 1), (4, row, row * tokens, row * tokens))
        packed = self.norm(packed)
        q_nope = graph.view(q, (key - roped, heads, tokens, 1), q.strides)
        q_pe = self.rope(graph.view(q, (roped, heads, tokens, 1), q.strides), inputs.positions)
        matrix = graph.weight(key - roped, rank, heads)
        absorbed = graph.mul_mat(matrix, graph.permute(q_nope, 0, 2, 1, 3))
        absorbed = graph.permute(absorbed, 0, 2, 1, 3)
        q = graph.new("concat", (rank + roped, heads, tokens), absorbed, q_pe)
        v = graph.view(packed, (rank, 1, tokens))
        k = graph.new("concat", (rank + roped, 1, tokens), v, k_pe)
        for tensor in (q, v, k):
            graph.expand(tensor)
        keys = self.cached(k, inputs.keys, batch.cells)
        values = graph.view(keys, (rank, *keys.shape[1:]), keys.strides)
        out = self.attend(q, keys, values, inputs.mask, graph.weight(rank, value, heads))
        return self.linear(out, shape.embedding)

    def cached(
        self, x: Tensor, indices: Tensor | None, cells: int, *, transposed: bool = False
    ) -> Tensor:
        """Write a batch's keys or values, and look at the whole cache."""
        graph, batch = self.graph, self.batch
        size, heads, tokens, _ = x.shape
        cache = graph.weight(size * heads, cells, batch.streams)
        flat = graph.view(x, (size * heads, tokens))
        if indices is not None:
            graph.expand(self.set_rows(cache, flat, indices))
        if transposed:
            return graph.view(cache, (cells, heads, size, batch.streams))
        return graph.view(cache, (size, heads, cells, batch.streams))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, unpack: Tensor | None = None
    ) -> Tensor:
        """`build_attn_mha`, with and without flash attention; `unpack` decompresses the values."""
        graph, batch, shape = self.graph, self.batch, self.shape
        streams = batch.streams if shape.has_cache else 1
        size, heads, tokens, _ = q.shape
        each = tokens // streams
        stride = q.strides
        q = graph.view(
            q, (size, heads, each, streams), (stride[0], stride[1], stride[2], stride[2] * each)
        )
        q = graph.permute(q, 0, 2, 1, 3)
        if batch.flash_attention:
            value = v.shape[0]
            k, v = graph.permute(k, 0, 2, 1, 3), graph.permute(v, 0, 2, 1, 3)
            if not shape.has_cache:
                k = graph.new("cast", k.shape, k, element_bytes=F16)
                v = graph.new("cast", v.shape, v, element_bytes=F16)
            out = graph.new("flash_attn", (value, heads, each, streams), q, k, v, mask)
            if (batch.quantized_keys or batch.quantized_values) and graph.device >= 0:
                width = k.shape[0] * batch.quantized_keys + v.shape[0] * batch.quantized_values
                elements = width * k.shape[1] * k.shape[2] * k.shape[3]
                out.extra_bytes = F16 * elements
            if unpack is not None:
                value = unpack.shape[1]
                out = graph.mul_mat(unpack, graph.permute(out, 0, 2, 1, 3))
                out = graph.like("cont", graph.permute(out, 0, 2, 1, 3))
            out = graph.view(out, (value * heads, tokens))
        else:
            if not shape.has_cache:
                v = graph.like("cont", graph.permute(v, 1, 2, 0, 3))
            else:
                v = graph.permute(v, 0, 2, 1, 3)
            k = graph.permute(k, 0, 2, 1, 3)
            kq = graph.new("mul_mat", (k.shape[1], each, heads, streams), k, q)
            kq = graph.like("soft_max", kq, mask)
            kqv = graph.new("mul_mat", (v.shape[1], each, heads, streams), v, kq)
            if unpack is not None:
                kqv = graph.mul_mat(unpack, kqv)
            merged = graph.permute(kqv, 0, 2, 1, 3)
            out = graph.new("cont", (kqv.shape[0] * heads, tokens), merged)
        graph.expand(out)
        return out

    def feed_forward(
        self, x: Tensor, layer: int, *, gated: bool, rows: int = 0, part: str = "ffn"
    ) -> Tensor:
        """`build_ffn`: parallel gate, or plain."""
        graph, shape = self.graph, self.shape
        width = rows or shape.feed_forward[layer]
        up = self.linear(x, width, bias=shape.has(layer, f"{part}_up.bias"))
        if gated:
            gate = self.linear(x, width, bias=shape.has(layer, f"{part}_gate.bias"))
            hidden = graph.like("glu", gate, up)
        else:
            hidden = graph.like("unary", up)
        return self.linear(hidden, x.shape[0], bias=shape.has(layer, f"{part}_down.bias"))

    def mixture(self, x: Tensor, layer: int) -> Tensor:
        """`build_moe_ffn`: route, run the chosen experts, add them up."""
        graph, shape = self.graph, self.shape
        width, tokens = x.shape[0], x.shape[1]
        used, count = shape.experts_used, shape.experts
        hidden = shape.expert_feed_forward or shape.feed_forward[layer]
        probs = graph.like("soft_max", self.linear(x, count))
        order = graph.new("argsort", (count, tokens), probs)
        chosen = graph.view(order, (used, tokens), order.strides)
        weights = graph.new(
            "get_rows", (1, used, tokens), graph.view(probs, (1, count, tokens)), chosen
        )
        flat = graph.view(weights, (used, tokens))
        total = graph.like("clamp", graph.new("sum_rows", (1, tokens), flat))
        weights = graph.view(graph.like("div", flat, total), (1, used, tokens))
        graph.expand(weights)
        each = graph.view(x, (width, 1, tokens))
        if shape.has(layer, "ffn_gate_up_exps.weight"):
            both = graph.new(
                "mul_mat_id",
                (2 * hidden, used, tokens),
                graph.weight(width, 2 * hidden, count),
                each,
                chosen,
            )
            gate = graph.view(both, (hidden, used, tokens, 1), both.strides)
            up = graph.view(both, (hidden, used, tokens, 1), both.strides)
        else:
            matrix = graph.weight(width, hidden, count)
            up = graph.new("mul_mat_id", (hidden, used, tokens), matrix, each, chosen)
            gate = graph.new("mul_mat_id", (hidden, used, tokens), matrix, each, chosen)
        mixed = graph.new("glu", (hidden, used, tokens), gate, up)
        experts = graph.new(
            "mul_mat_id", (width, used, tokens), graph.weight(hidden, width, count), mixed, chosen
        )
        experts = graph.like("mul", experts, weights)
        graph.expand(experts)
        stride = experts.strides
        views = [
            graph.view(experts, (width, tokens, 1, 1), (stride[0], stride[2], stride[3], stride[3]))
            for _ in range(used)
        ]
        for view in views:
            graph.expand(view)
        out = views[0]
        for view in views[1:]:
            out = graph.new("add", (width, tokens), out, view)
            graph.expand(out)
        return graph.new("cont", (width, tokens), out) if used == 1 else out

    # -- whole models

    def decoder(self) -> None:
        """Pre-norm blocks with a cache (or none), as in llama, qwen, mistral and gemma."""
        graph, shape = self.graph, self.shape
        stream = self.embeddings()
        inputs = self.inputs()
        last = shape.layers - 1
        late = shape.architecture in LATE_OUTPUTS
        only_post = not shape.has(last, "ffn_norm.weight")
        for layer in self.layers:
            graph.device = self.devices[layer]
            x, residual = self.norm(stream), stream
            x = self.attended(x, layer, inputs)
            if layer == last and not late:
                x, residual = self.picked(x, inputs), self.picked(residual, inputs)
            if shape.has(layer, "post_attention_norm.weight") and not only_post:
                x = self.norm(x)
            joined = graph.like("add", x, residual)
            x = self.block(self.norm(joined), layer)
            if shape.has(layer, "post_ffw_norm.weight"):
                x = self.norm(x)
            stream = graph.like("add", x, joined)
        graph.device = self.devices[shape.layers]
        hidden = self.norm(self.picked(stream, inputs) if late else stream)
        hidden.is_output = True
        if shape.has_cache:
            logits = self.linear(hidden, shape.vocabulary)
            logits.is_output = True
            graph.expand(logits)
        else:
            graph.expand(hidden)
        self.pool(hidden)

    def attended(self, x: Tensor, layer: int, inputs: _Inputs) -> Tensor:
        """A layer's attention, projected back."""
        graph, shape = self.graph, self.shape
        if shape.latent is not None:
            return self.latent_attention(x, layer, inputs)
        if layer in shape.recurrent_layers:
            # a guess: the mixer's projections are about four times as wide as the stream
            return self.linear(self.linear(x, 4 * shape.embedding), shape.embedding)
        q, k, v = self.qkv(x, layer)
        if shape.has(layer, "attn_q_norm.weight"):
            q, k = self.norm(q), self.norm(k)
        q, k = self.rope(q, inputs.positions), self.rope(k, inputs.positions)
        if shape.architecture in SCALED_EMBEDDINGS:
            q = graph.like("scale", q)
        return self.attention(q, k, v, layer, inputs)

    def block(self, x: Tensor, layer: int) -> Tensor:
        shape = self.shape
        if not shape.has(layer, "ffn_gate_inp.weight"):
            return self.feed_forward(x, layer, gated=shape.has(layer, "ffn_gate.weight"))
        out = self.mixture(x, layer)
        if weight := shape.weight(f"blk.{layer}.ffn_up_shexp.weight"):
            shared = self.feed_forward(x, layer, gated=True, rows=weight.shape[1], part="ffn_shexp")
            return self.graph.like("add", out, shared)
        return out

    def picked(self, x: Tensor, inputs: _Inputs) -> Tensor:
        """Only the rows whose result is wanted."""
        return self.graph.new("get_rows", (x.shape[0], self.batch.outputs), x, inputs.outputs)

    def encoder(self) -> None:
        """Post-norm blocks without a cache (bert and its kin)."""
        graph, shape = self.graph, self.shape
        stream = self.embeddings()
        inputs = self.inputs()
        names = shape.names
        if "token_types.weight" in names:
            types = graph.view(graph.weight(shape.embedding, 2), (shape.embedding,))
            stream = graph.like("add", stream, types)
        if "position_embd.weight" in names:
            table = graph.weight(shape.embedding, shape.context_train)
            placed = graph.new("get_rows", stream.shape, table, inputs.positions)
            stream = graph.like("add", placed, stream)
        stream = self.norm(stream, kind="norm", bias=True)
        for layer in self.layers:
            graph.device = self.devices[layer]
            q, k, v = self.qkv(stream, layer)
            if shape.architecture != "bert":
                q, k = self.rope(q, inputs.positions), self.rope(k, inputs.positions)
            x = self.attention(q, k, v, layer, inputs)
            if layer == shape.layers - 1:
                x, stream = self.picked(x, inputs), self.picked(stream, inputs)
            joined = self.norm(graph.like("add", x, stream), kind="norm", bias=True)
            if shape.has(layer, "ffn_gate_inp.weight"):
                x = self.mixture(joined, layer)
            else:
                x = self.feed_forward(joined, layer, gated=shape.has(layer, "ffn_gate.weight"))
            stream = self.norm(graph.like("add", x, joined), kind="norm", bias=True)
        stream.is_output = True
        graph.expand(stream)
        self.pool(stream)

    def pool(self, hidden: Tensor) -> None:
        """`build_pooling`: one vector a sequence, when embeddings are wanted."""
        graph, batch = self.graph, self.batch
        if not batch.embeddings or batch.pooling == 0:
            return
        mean = 1
        if batch.pooling == mean:
            turned = graph.permute(hidden, 1, 0, 2, 3)
            flat = graph.like("cont", turned)
            weights = graph.input(batch.tokens, batch.sequences)
            pooled = graph.new("mul_mat", (hidden.shape[0], batch.sequences), flat, weights)
        else:
            chosen = graph.input(batch.sequences)
            pooled = graph.new("get_rows", (hidden.shape[0], batch.sequences), hidden, chosen)
        pooled.is_output = True
        graph.expand(pooled)
