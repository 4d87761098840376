"""Where a model can sit, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import DoesNotFit
from mmadmin.core.fit.estimate import Calibration
from mmadmin.core.fit.facts import GpuFacts, HostFacts
from mmadmin.core.fit.placement import (
    HOST_RESERVE_BYTES,
    RESERVE_BYTES,
    Beside,
    Footprint,
    HostView,
    Running,
    Wanted,
    choose_seat,
    everywhere,
    fits_beside,
    footprint_on,
    footprints_as_json,
    footprints_from_json,
    freed,
    make_room,
    place,
    promised,
    seats,
)
from mmadmin.core.formats.gguf.shape import ModelShape
from tests.core.fit.wanted import wanted_for
from tests.core.formats.gguf.tables import llama, mistral_medium

GIB = 1024**3
SEED: dict[str, Json] = {"context": 65536, "gpu_layers": 99, "tensor_split": ["8"] * 4}


def host(
    gpus: list[tuple[str, int, int]], *, memory_gib: int = 256, cuda: str = "12.8"
) -> HostFacts:
    """A host with GPUs of (capability, total GiB, free GiB)."""
    return HostFacts(
        arch="x86_64",
        os="linux",
        libc="glibc-2.36",
        cpu_model="test",
        cpu_features=("avx2",),
        cpu_count=16,
        memory_total_bytes=memory_gib * GIB,
        memory_available_bytes=memory_gib * GIB,
        compiler="gcc-12.2.0",
        cuda=cuda if gpus else "",
        gpus=tuple(
            GpuFacts(i, "GPU", capability, total * GIB, free * GIB)
            for i, (capability, total, free) in enumerate(gpus)
        ),
    )


def wanted(quant: str = "Q4_K_M", **options: Json) -> Wanted:
    """The first deployment, or another quant or other options of it."""
    return wanted_for(mistral_medium(quant), **{**SEED, **options})


def needs(devices: Sequence[int], *gib: int, resident: int = 0) -> Footprint:
    """So much on each of these cards, and in main memory."""
    own = resident * GIB
    return Footprint(tuple(devices), tuple(size * GIB for size in gib), own, own, own)


V100S = host([("7.0", 32, 31)] * 4)


def test_the_first_deployment_goes_to_the_v100s() -> None:
    """Of a V100 box, one L40S and a CPU host, only the first takes it under its split."""
    answer = place(
        wanted(),
        [
            HostView("big", V100S),
            HostView("small", host([("8.9", 46, 45)])),
            HostView("desk", host([], memory_gib=16)),
        ],
    )
    assert [(c.host, c.devices, c.stop) for c in answer.candidates] == [("big", (0, 1, 2, 3), ())]
    assert {r.host for r in answer.refusals} == {"small", "desk"}
    assert "want 4 GPUs" in answer.refusals[0].reason
    assert "main memory" in answer.refusals[1].reason


def test_bf16_is_refused_with_the_bytes() -> None:
    """248 GB on 128 GB of cards: the reason names a GPU and two sizes."""
    answer = place(wanted("BF16"), [HostView("big", V100S)])
    with pytest.raises(DoesNotFit, match="GPU 0 needs") as caught:
        answer.best()
    assert "big" in caught.value.details["hosts"]
    assert answer.refusals[0].remedy


def test_a_rule_refuses_before_memory_is_asked() -> None:
    """A toolkit that cannot compile for the card is named, not the bytes."""
    answer = place(wanted(), [HostView("new", host([("7.0", 32, 31)] * 4, cuda="13.0"))])
    assert answer.refusals[0].findings[0].rule == "cuda13-has-no-volta"
    assert "CUDA 12" in answer.refusals[0].remedy


def test_the_fewest_are_stopped_to_make_room() -> None:
    """Of three deployments only the one that is in the way is stopped."""
    facts = host([("7.0", 32, 31), ("7.0", 32, 31), ("7.0", 32, 10), ("7.0", 32, 31)])
    running = [
        Running("chat", {2: 20 * GIB}),
        Running("embeddings", {3: GIB}),
        Running("tiny", {2: GIB}),
    ]
    answer = place(wanted(), [HostView("big", facts, running)])
    assert answer.candidates[0].stop == ("chat",)
    assert "after stopping chat" in answer.candidates[0].message


def test_a_small_model_takes_one_gpu() -> None:
    """Without a split the fewest GPUs that fit are taken, and the emptiest of them."""
    shape = llama(
        layers=4,
        embedding=256,
        feed_forward=512,
        heads=8,
        kv_heads=2,
        head_size=32,
        vocabulary=1024,
    )
    facts = host([("8.0", 80, 1), ("8.0", 80, 79), ("8.0", 80, 40)])
    answer = place(wanted_for(shape, context=2048), [HostView("a", facts)])
    assert answer.best().devices == (1,)


def test_unlike_gpus_are_not_mixed() -> None:
    """A set of GPUs has one architecture: one engine build serves it."""
    facts = host([("7.0", 32, 31), ("7.0", 32, 31), ("8.0", 40, 39), ("8.0", 40, 39)])
    answer = place(wanted(), [HostView("mixed", facts)])
    assert answer.refusals[0].host == "mixed"


def test_less_context_is_suggested_on_a_host_without_gpus() -> None:
    """The most that its main memory holds; none where not even the weights fit."""
    shape = llama(
        layers=32,
        embedding=4096,
        feed_forward=14336,
        heads=32,
        kv_heads=8,
        head_size=128,
        vocabulary=32000,
        quant="Q4_K_M",
        context=1 << 20,
    )
    asked = wanted_for(shape, context=1 << 20, gpu_layers=0)
    view = HostView("desk", host([], memory_gib=16))
    refused = place(asked, [view]).refusals[0]
    remedy, context = refused.remedy, refused.suggestions[-1].options["context"]
    assert isinstance(context, int)
    assert remedy == f"a context of {context} tokens a request"
    for tokens, ok in ((context, True), (context + 1024, False)):
        answer = place(wanted_for(shape, context=tokens, gpu_layers=0), [view])
        assert bool(answer.candidates) is ok, tokens
    tiny = place(asked, [HostView("stamp", host([], memory_gib=1))]).refusals[0]
    assert tiny.remedy == "take a smaller quant, or a host with more memory"


def test_a_refusal_suggests_what_would_fit() -> None:
    """Too much context is answered with options whose prediction fits."""
    answer = place(wanted("Q6_K", context=131072), [HostView("big", V100S)])
    assert answer.refusals[0].suggestions
    assert answer.refusals[0].remedy == answer.refusals[0].suggestions[0].message


def test_beside_in_its_place_or_not_at_all() -> None:
    """The three answers at an activation, by what is free now and what will be."""
    facts = host([("7.0", 32, 20)])
    small, large, huge = (needs((0,), size) for size in (10, 25, 40))
    old = Running("chat", {0: 11 * GIB})
    assert fits_beside(small, facts, old).mode == "overlap"
    swap = fits_beside(large, facts, old)
    assert swap.mode == "swap"
    assert swap.short_bytes == {0: 25 * GIB + RESERVE_BYTES - 20 * GIB}
    assert fits_beside(huge, facts, old).mode == "refuse"
    assert fits_beside(large, facts).mode == "refuse"
    assert fits_beside(small.on([3]), facts, old).message == "there is no GPU 3 on this host"


def test_main_memory_counts_too() -> None:
    """A CPU host overlaps only while both fit into its memory."""
    facts = host([], memory_gib=8)
    large = needs((), resident=10)
    old = Running("chat", {}, host_bytes=4 * GIB)
    assert fits_beside(large, facts, old).mode == "swap"
    assert fits_beside(replace(large, resident_bytes=2 * GIB), facts, old).mode == "overlap"
    assert fits_beside(large, facts).as_json()["mode"] == "refuse"


def test_the_forecast_and_the_activation_name_the_same_gpus() -> None:
    """Three shares on four cards, the first of them full: both take the three that are free."""
    facts = host([("7.0", 32, 1), ("7.0", 32, 31), ("7.0", 32, 31), ("7.0", 32, 31)])
    three = wanted(tensor_split=["1", "1", "1"], context=8192)
    forecast = place(three, [HostView("big", facts)]).best()
    room = choose_seat(seats(three, facts, Calibration()), facts)
    assert (room.mode, room.devices) == ("overlap", (1, 2, 3))
    assert forecast.devices == room.devices


def test_a_deployment_may_name_its_gpus() -> None:
    """They are taken in the order of the file, whatever else is free; one too many is refused."""
    shape = SHAPES[0]
    named = wanted_for(shape, context=1024, devices=(3, 2))
    assert place(named, [HostView("big", V100S)]).best().devices == (3, 2)
    assert choose_seat(seats(named, V100S, Calibration()), V100S).devices == (3, 2)
    other = wanted_for(shape, context=1024, devices=(4,))
    assert "no GPU 4" in place(other, [HostView("big", V100S)]).refusals[0].reason
    with pytest.raises(DoesNotFit, match="no GPU 4"):
        list(seats(other, V100S, Calibration()))
    split = wanted_for(shape, context=1024, devices=(0, 1), tensor_split=["1", "1", "1"])
    with pytest.raises(DoesNotFit, match="3 shares for 2"):
        list(seats(split, V100S, Calibration()))


def test_a_swap_may_take_the_gpus_of_the_one_that_leaves() -> None:
    """Where no other card has room, the old one's will once it has stopped."""
    facts = host([("7.0", 32, 3), ("7.0", 32, 8)])
    found = choose_seat(everywhere([needs((1,), 20)], facts), facts, Running("chat", {0: 28 * GIB}))
    assert (found.mode, found.devices) == ("swap", (0,))


def test_footprints_hold_for_like_gpus() -> None:
    """One card's figure holds for each card of its kind, emptiest first; records keep them."""
    facts = host([("7.0", 32, 5), ("7.0", 32, 31), ("8.0", 40, 39)])
    known = [needs((0,), 20)]
    assert [one.devices for one in everywhere(known, facts)] == [(1,), (0,)]
    assert footprints_from_json(footprints_as_json(known)) == known
    assert footprints_from_json(known[0].as_json()) == known
    assert footprint_on(known, (2,)) == known[0].on((2,))
    assert footprint_on(known, (0, 1)) is None
    assert footprint_on(known, None) == known[0]


def test_what_is_promised_is_not_given_twice() -> None:
    """An engine that still loads keeps its card: the next one takes another."""
    one = everywhere([needs((0,), 20)], V100S)
    facts = promised(V100S, [Running("loading", {0: 20 * GIB}, GIB)])
    assert choose_seat(one, facts).devices == (1,)
    assert facts.memory_available_bytes == V100S.memory_available_bytes - GIB


TRIALS = [Running("a", {0: 2 * GIB}), Running("b", {1: 8 * GIB}), Running("c", {0: 6 * GIB})]


@pytest.mark.parametrize(
    ("size_gib", "wanted", "mode", "ended"),
    [
        (9, "auto", "overlap", ""),
        (11, "auto", "overlap", "a"),
        (15, "auto", "overlap", "c"),
        (17, "auto", "overlap", "ac"),
        (22, "auto", "swap", ""),
        (22, "overlap", "swap", ""),
        (12, "swap", "swap", ""),
        (25, "swap", "swap", "c"),
        (40, "auto", "refuse", ""),
    ],
)
def test_only_what_makes_room_ends(size_gib: int, wanted: str, mode: str, ended: str) -> None:
    """Nothing ends that does not help, or for what is refused all the same."""
    facts = host([("7.0", 32, 10), ("7.0", 32, 10)])
    old = Running("chat", {0: 13 * GIB})

    def look(gone: Sequence[Running]) -> Beside:
        return fits_beside(needs((0,), size_gib), reduce(freed, gone, facts), old)

    room, ends = make_room(look, TRIALS, wanted=wanted)
    assert (room.mode, "".join(one.name for one in ends)) == (mode, ended)
    assert room.message == look(TRIALS if mode == "refuse" else ends).message


SIZES = st.integers(0, 40)
SHAPES = [
    llama(
        layers=8,
        embedding=512 * scale,
        feed_forward=1024 * scale,
        heads=8,
        kv_heads=8,
        head_size=64 * scale,
        vocabulary=4096,
    )
    for scale in (1, 4, 16)
]


@settings(max_examples=80, deadline=None)
@given(
    free=st.lists(SIZES, min_size=1, max_size=4),
    running=st.lists(st.dictionaries(st.integers(0, 3), SIZES, max_size=4), max_size=4),
    context=st.sampled_from([1024, 8192, 65536]),
    shape=st.sampled_from(SHAPES),
)
def test_a_candidate_always_fits_and_stops_no_more_than_needed(
    free: list[int], running: list[dict[int, int]], context: int, shape: ModelShape
) -> None:
    """Whatever a host looks like: it is in one list, what is offered fits, no stop is for nothing."""
    facts = host([("8.0", 48, f) for f in free], memory_gib=64)
    busy = [
        Running(f"d{i}", {k: v * GIB for k, v in one.items() if k < len(free)})
        for i, one in enumerate(running)
    ]
    answer = place(wanted_for(shape, context=context), [HostView("h", facts, busy)])
    assert len(answer.candidates) + len(answer.refusals) == 1
    for refusal in answer.refusals:
        assert refusal.reason
    for candidate in answer.candidates:
        assert _fits(candidate.devices, candidate.estimate.per_device, free, busy, candidate.stop)
        for name in candidate.stop:
            fewer = tuple(s for s in candidate.stop if s != name)
            assert not _fits(candidate.devices, candidate.estimate.per_device, free, busy, fewer)


def _fits(
    devices: tuple[int, ...],
    per_device: tuple[int, ...],
    free: list[int],
    busy: list[Running],
    stop: tuple[str, ...],
) -> bool:
    gone = [r for r in busy if r.name in stop]
    return all(
        need == 0 or need + RESERVE_BYTES <= free[d] * GIB + sum(r.devices.get(d, 0) for r in gone)
        for d, need in zip(devices, per_device, strict=True)
    )


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    free=st.lists(SIZES, min_size=3, max_size=3),
    held=st.lists(SIZES, min_size=3, max_size=3),
)
def test_an_overlap_never_needs_more_than_is_free(
    sizes: list[int], free: list[int], held: list[int]
) -> None:
    """Overlap implies that all fits now, swap that it fits once the old one is gone."""
    facts = host([("8.0", 80, f) for f in free])
    old = Running("old", {i: h * GIB for i, h in enumerate(held)})
    answer = fits_beside(needs(range(len(sizes)), *sizes), facts, old)
    now = all(n == 0 or n * GIB + RESERVE_BYTES <= f * GIB for n, f in zip(sizes, free))  # noqa: B905
    then = all(
        n == 0 or n * GIB + RESERVE_BYTES <= (f + h) * GIB
        for n, f, h in zip(sizes, free, held)  # noqa: B905
    )
    assert answer.mode == ("overlap" if now else "swap" if then else "refuse")
    assert HOST_RESERVE_BYTES < 64 * GIB
