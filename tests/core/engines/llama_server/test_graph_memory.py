"""The replayed graph allocator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.engines.llama_server.graph_memory import Graph, Tensor, peak_bytes

KIB = 1024


def chain(graph: Graph, op: str, length: int) -> Tensor:
    """A chain of one-KiB nodes."""
    node = graph.new("get_rows", (256,), graph.weight(256, 10))
    for _ in range(length):
        node = graph.like(op, node)
    graph.expand(node)
    return node


def test_in_place_operations_take_no_more_room() -> None:
    """A chain that may overwrite its source needs one buffer, however long it is."""
    graph = Graph()
    chain(graph, "add", 20)
    assert peak_bytes(graph)[-1] == KIB


def test_other_operations_take_turns_in_two_buffers() -> None:
    """A chain that may not overwrite needs two: the source and the result."""
    graph = Graph()
    chain(graph, "glu", 20)
    assert peak_bytes(graph)[-1] == 2 * KIB


def test_a_second_reader_keeps_its_source() -> None:
    """A tensor that is still wanted is neither overwritten nor freed."""
    graph = Graph()
    first = graph.new("get_rows", (256,), graph.weight(256, 10))
    second = graph.like("scale", first)
    graph.expand(graph.like("add", second, first))
    assert peak_bytes(graph)[-1] == 2 * KIB


def test_outputs_are_kept() -> None:
    """What the caller reads afterwards keeps its place."""
    graph = Graph()
    first = graph.new("get_rows", (256,), graph.weight(256, 10))
    first.is_output = True
    graph.expand(graph.like("add", graph.like("add", first)))
    assert peak_bytes(graph)[-1] == 2 * KIB


def test_views_and_weights_cost_nothing() -> None:
    """Weights have buffers of their own, and a view is its source."""
    graph = Graph()
    weight = graph.weight(256, 4)
    node = graph.mul_mat(weight, graph.view(graph.input(256), (256, 1)))
    graph.expand(graph.view(node, (2, 2)))
    assert peak_bytes(graph)[-1] == KIB + 32


def test_a_device_gets_copies_of_what_crosses() -> None:
    """Two GPUs: each computes its part, and the pipeline keeps four copies of what crosses."""

    def two_stage() -> Graph:
        graph = Graph(device=0)
        node = graph.new("get_rows", (256,), graph.weight(256, 10), graph.input(8, device=-1))
        graph.device = 1
        graph.expand(graph.like("glu", node))
        return graph

    plain = peak_bytes(two_stage(), devices=2)
    piped = peak_bytes(two_stage(), devices=2, pipeline=True)
    assert plain[1] == 2 * KIB
    assert piped[1] == 5 * KIB
    assert piped[-1] == 4 * 32


OPS = st.sampled_from(["add", "glu", "mul_mat", "scale", "cont"])


@given(
    st.lists(st.tuples(OPS, st.integers(0, 7), st.integers(0, 7), st.integers(1, 40)), max_size=40)
)
def test_the_peak_is_between_the_largest_node_and_the_sum(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Whatever the graph, the buffer holds its largest step and never more than everything."""
    graph = Graph()
    made = [graph.new("get_rows", (64,), graph.weight(64, 10))]
    for op, a, b, size in steps:
        x, y = made[-1 - a % len(made)], made[-1 - b % len(made)]
        if op in ("add", "scale", "cont"):
            made.append(graph.like(op, x, y))
        else:
            made.append(graph.new(op, (16 * size,), x, y))
    for node in made:
        graph.expand(node)
    peak = peak_bytes(graph)[-1]
    sizes = [-(-node.size_bytes // 32) * 32 for node in graph.nodes]
    assert max(sizes) <= peak <= sum(sizes)
