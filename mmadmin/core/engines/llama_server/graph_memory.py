"""How many bytes a compute graph needs: ggml's graph allocator, replayed without data.

llama.cpp logs a "compute buffer size": the peak of the allocator that ggml runs over the
worst-case graph. There is no closed formula for it, as it depends on what is reused in place and
which holes fit, so this module replays the allocator on shapes alone. It holds no tensor data.

Sources (llama.cpp b11434): node order from `ggml_visit_parents_graph` (ggml.c); in-place reuse,
best fit and freeing from `ggml_gallocr_allocate_node`, `ggml_gallocr_alloc_graph_impl` and
`ggml_dyn_tallocr_alloc` (ggml-alloc.c); input copies between devices from
`ggml_backend_sched_split_graph` (ggml-backend.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

HOST_ALIGNMENT = 32
"""`TENSOR_ALIGNMENT` (ggml-impl.h)."""
CUDA_ALIGNMENT = 128
"""`ggml_backend_cuda_buffer_type_get_alignment` (ggml-cuda.cu)."""
PIPELINE_COPIES = 4
"""`GGML_SCHED_MAX_COPIES`: copies of each input when several GPUs work as a pipeline."""

IN_PLACE = frozenset(
    {"scale", "add", "add_id", "sub", "mul", "div", "sqr", "sqrt", "unary", "rope", "rms_norm"}
    | {"clamp", "soft_max", "fill"}
)
"""`ggml_op_can_inplace`: operations that may write over a parent of the same layout."""
VIEWS = frozenset({"view", "reshape", "permute", "transpose"})
"""Operations that compute nothing (`ggml_is_view_op`)."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A node or leaf of a graph: a shape, where it comes from, and where it lives."""

    op: str
    shape: tuple[int, int, int, int]
    element_bytes: int
    strides: tuple[int, int, int, int]
    sources: tuple[Tensor, ...] = ()
    view_of: Tensor | None = None
    external: bool = False
    """Lives in a buffer of its own: a weight or a cache."""
    is_input: bool = False
    is_output: bool = False
    device: int = 0
    """Which device computes it (see `peak_bytes`)."""
    extra_bytes: int = 0
    """Scratch memory that its device keeps behind the result."""

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor spans."""
        return (
            self.extra_bytes
            + self.element_bytes
            + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """What must be equal for an in-place reuse (`ggml_are_same_layout`)."""
        return (self.element_bytes, self.shape, self.strides)


def _strides(shape: Sequence[int], element_bytes: int) -> tuple[int, int, int, int]:
    a, b, c, _ = shape
    return (
        element_bytes,
        element_bytes * a,
        element_bytes * a * b,
        element_bytes * a * b * c,
    )


def _four(shape: Sequence[int]) -> tuple[int, int, int, int]:
    a, b, c, d = (*shape, 1, 1, 1)[:4]
    return (a, b, c, d)


@dataclass(slots=True)
class Graph:
    """A graph under construction; nodes are ordered as they are demanded."""

    nodes: list[Tensor] = field(default_factory=list)
    leafs: list[Tensor] = field(default_factory=list)
    device: int = 0
    """The device that new nodes are assigned to."""
    _seen: set[int] = field(default_factory=set)

    def weight(self, *shape: int) -> Tensor:
        """A tensor of the model or of a cache: costs nothing here."""
        full = _four(shape)
        return Tensor("none", full, 4, _strides(full, 4), external=True, device=self.device)

    def input(self, *shape: int, element_bytes: int = 4, device: int = -1) -> Tensor:
        """A tensor that is filled before each batch; lives on the host by default."""
        full = _four(shape)
        strides = _strides(full, element_bytes)
        return Tensor("none", full, element_bytes, strides, is_input=True, device=device)

    def new(
        self, op: str, shape: Sequence[int], *sources: Tensor, element_bytes: int = 4
    ) -> Tensor:
        """A node with memory of its own (unless it can be made in place)."""
        full = _four(shape)
        return Tensor(
            op, full, element_bytes, _strides(full, element_bytes), sources, device=self.device
        )

    def like(self, op: str, first: Tensor, *others: Tensor) -> Tensor:
        """A node of its first source's shape, contiguous."""
        return self.new(op, first.shape, first, *others, element_bytes=first.element_bytes)

    def view(
        self, source: Tensor, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> Tensor:
        """Another look at the same memory; contiguous unless `strides` say otherwise."""
        full = _four(shape)
        origin = source.view_of or source
        if strides is None:
            chosen = _strides(full, source.element_bytes)
        else:
            a, b, c, d = strides
            chosen = (a, b, c, d)
        return Tensor(
            "view",
            full,
            source.element_bytes,
            chosen,
            (source,),
            view_of=origin,
            device=self.device,
        )

    def permute(self, source: Tensor, *order: int) -> Tensor:
        """Axis `i` of the source becomes axis `order[i]` (as `ggml_permute`)."""
        shape, strides = [0] * 4, [0] * 4
        for i, axis in enumerate(order):
            shape[axis], strides[axis] = source.shape[i], source.strides[i]
        return self.view(source, shape, strides)

    def mul_mat(self, weight: Tensor, x: Tensor) -> Tensor:
        """`ggml_mul_mat`: rows of the weight by columns of x."""
        return self.new("mul_mat", (weight.shape[1], x.shape[1], x.shape[2], x.shape[3]), weight, x)

    def expand(self, tensor: Tensor) -> None:
        """Add a tensor and all that it needs, sources first, left to right."""
        stack: list[tuple[Tensor, int]] = [(tensor, 0)]
        while stack:
            node, index = stack.pop()
            if index == 0:
                if id(node) in self._seen:
                    continue
                self._seen.add(id(node))
            if index < len(node.sources):
                stack.append((node, index + 1))
                stack.append((node.sources[index], 0))
                continue
            (self.leafs if node.op == "none" else self.nodes).append(node)


@dataclass(slots=True)
class _Space:
    """`ggml_dyn_tallocr` with one chunk: free blocks sorted by offset, and the high-water mark."""

    alignment: int
    free: list[list[int]] = field(default_factory=lambda: [[0, 1 << 62]])
    peak: int = 0

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def take(self, size: int) -> int:
        size = self.padded(size)
        best = None
        for block in self.free[:-1]:
            # "<=": of equally good blocks the last one is taken
            if block[1] >= size and (best is None or block[1] <= best[1]):
                best = block
        block = best or self.free[-1]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            self.free.remove(block)
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        size = self.padded(size)
        for i, block in enumerate(self.free):
            if block[0] + block[1] == offset:
                block[1] += size
                if i + 1 < len(self.free) and block[0] + block[1] == self.free[i + 1][0]:
                    block[1] += self.free[i + 1][1]
                    del self.free[i + 1]
                return
            if offset + size == block[0]:
                block[0], block[1] = offset, block[1] + size
                return
        place = next((i for i, b in enumerate(self.free) if b[0] > offset), len(self.free))
        self.free.insert(place, [offset, size])


@dataclass(slots=True)
class _Use:
    """What the allocator knows of one tensor."""

    children: int = 0
    views: int = 0
    allocated: bool = False
    device: int = 0
    offset: int = 0


class _Allocator:
    """One pass of `ggml_gallocr_alloc_graph_impl` over nodes that know their device."""

    def __init__(self, alignments: Mapping[int, int]) -> None:
        self.spaces = {device: _Space(alignment) for device, alignment in alignments.items()}
        self.uses: dict[int, _Use] = {}

    def use(self, tensor: Tensor) -> _Use:
        return self.uses.setdefault(id(tensor), _Use())

    def run(self, leafs: Iterable[Tensor], nodes: Sequence[Tensor]) -> dict[int, int]:
        for leaf in leafs:
            self.allocate(leaf, leaf.device)
        for node in nodes:
            if node.view_of is not None and node.op != "none":
                self.use(node.view_of).views += 1
            if node.is_input:
                self.allocate(node, node.device)
            for source in node.sources:
                self.use(source).children += 1
                if source.is_input:
                    self.allocate(source, node.device)
        for node in nodes:
            for source in node.sources:
                self.allocate(source, node.device)
            self.allocate(node, node.device)
            for source in node.sources:
                self.release(source)
        return {device: space.peak for device, space in self.spaces.items()}

    def allocate(self, tensor: Tensor, device: int) -> None:
        use = self.use(tensor)
        if use.allocated or tensor.external or tensor.view_of is not None:
            return
        use.allocated = True
        if tensor.op in IN_PLACE and self.reuse(tensor, use):
            return
        use.device = device
        use.offset = self.spaces[device].take(tensor.size_bytes)

    def reuse(self, tensor: Tensor, use: _Use) -> bool:
        for parent in tensor.sources:
            known = self.use(parent)
            if (
                known.allocated
                and not parent.is_output
                and parent.layout == tensor.layout
                and known.children == 1
                and known.views == 0
            ):
                use.device, use.offset = known.device, known.offset
                known.allocated = False
                return True
        return False

    def release(self, source: Tensor) -> None:
        use = self.use(source)
        use.children -= 1
        if use.children or use.views:
            return
        if source.view_of is not None:
            origin = self.use(source.view_of)
            origin.views -= 1
            if not origin.views and not origin.children and origin.allocated:
                self.give(source.view_of)
        elif use.allocated:
            self.give(source)

    def give(self, tensor: Tensor) -> None:
        if tensor.is_output:
            return
        use = self.use(tensor)
        self.spaces[use.device].give(use.offset, tensor.size_bytes)
        use.allocated = False


def peak_bytes(graph: Graph, *, devices: int = 0, pipeline: bool = False) -> dict[int, int]:
    """Compute buffer bytes by device; -1 is the host, 0 … `devices` - 1 are GPUs.

    With `devices` 0 everything is computed on the host. With several devices in a `pipeline`,
    inputs that cross to a device are kept there in `PIPELINE_COPIES`, as the scheduler does.
    """
    if devices == 0:
        for tensor in (*graph.leafs, *graph.nodes):
            tensor.device = -1
        return _Allocator({-1: HOST_ALIGNMENT}).run(graph.leafs, graph.nodes)
    copies = PIPELINE_COPIES if pipeline else 1
    pinned = _pinned_inputs(graph, copies)
    crossed, nodes = _split(graph, copies)
    alignments = {-1: HOST_ALIGNMENT} | dict.fromkeys(range(devices), CUDA_ALIGNMENT)
    return _Allocator(alignments).run([*pinned, *crossed, *graph.leafs], nodes)


def _pinned_inputs(graph: Graph, copies: int) -> list[Tensor]:
    """The further copies of the graph's own inputs, so that a batch can wait for its turn."""
    if copies == 1:
        return []
    inputs = [leaf for leaf in graph.leafs if leaf.is_input]
    for leaf in inputs:
        leaf.is_output = True
    return [_copy(leaf, leaf.device, pinned=True) for leaf in inputs for _ in range(copies - 1)]


def _split(graph: Graph, copies: int) -> tuple[list[Tensor], list[Tensor]]:
    """Cut the nodes into runs of one device each, and let each run read its sources there.

    Copies are made at the start of a run, and their originals are let go then. Returns the copies
    that are pinned (leafs), and the nodes with copies among them.
    """
    pinned: list[Tensor] = []
    nodes: list[Tensor] = []
    made: dict[tuple[int, int], Tensor] = {}
    for run in _runs(graph.nodes):
        device = next((node.device for node in run if node.op not in VIEWS), -1)
        for node in run:
            if node.op in VIEWS:
                continue
            for source in node.sources:
                key = (id(source), device)
                if key in made or source.device == device or _is_external(source):
                    continue
                twins = [_copy(source, device, pinned=copies > 1) for _ in range(copies)]
                made[key] = twins[0]
                nodes += [_until(source), twins[0]]
                if copies > 1:
                    pinned += twins
        for node in run:
            if node.op not in VIEWS:
                node.sources = tuple(made.get((id(s), device), s) for s in node.sources)
        nodes += run
    return pinned, nodes


def _runs(nodes: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive nodes of one device; views go with what is before them."""
    runs: list[list[Tensor]] = [[]]
    current: int | None = None
    for node in nodes:
        if node.op not in VIEWS and current not in (None, node.device):
            runs.append([])
        if node.op not in VIEWS:
            current = node.device
        runs[-1].append(node)
    return runs


def _until(source: Tensor) -> Tensor:
    """A node that does nothing but keep a tensor until its copy is made."""
    return Tensor(
        "none",
        source.shape,
        source.element_bytes,
        source.strides,
        (source,),
        view_of=source.view_of or source,
        device=source.device,
    )


def _is_external(tensor: Tensor) -> bool:
    return tensor.external or (tensor.view_of is not None and tensor.view_of.external)


def _copy(source: Tensor, device: int, *, pinned: bool) -> Tensor:
    """The input copy of a tensor on another device; pinned ones are never overwritten."""
    size = prod(source.shape) * source.element_bytes
    shape = (size // source.element_bytes, 1, 1, 1)
    return Tensor(
        "none",
        shape,
        source.element_bytes,
        _strides(shape, source.element_bytes),
        is_input=pinned,
        is_output=pinned,
        device=device,
    )
