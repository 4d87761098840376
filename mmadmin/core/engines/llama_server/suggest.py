"""What to change so that a model fits: split, cache type, slots, context, quant.

Every suggestion is a change of serve options with the prediction that it leads to; none is made
by a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.memory import compute_buffers, predict
from mmadmin.core.engines.llama_server.run_shape import RunShape
from mmadmin.core.engines.llama_server.weights import place_layers
from mmadmin.core.fit.estimate import Calibration, Device, Room, Suggestion, fits
from mmadmin.core.formats.gguf.shape import ModelShape

SLOT_LIMIT = 32
"""More slots than this are not suggested: each one slows the others down."""


def largest_context(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device],
    room: Room,
    calibration: Calibration | None = None,
) -> int:
    """The most tokens a slot that fit, a multiple of 1024 up to the training context; 0 = none."""

    def fitting(thousands: int) -> bool:
        tried = replace(run, context=thousands * 1024)
        return fits(predict(shape, tried, devices, calibration=calibration), devices, room)

    return _largest(max(shape.context_train, 1024) // 1024, fitting) * 1024


def most_slots(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device],
    room: Room,
    calibration: Calibration | None = None,
) -> int:
    """How many requests of the run's context are served at once, up to `SLOT_LIMIT`; 0 = none."""

    def fitting(slots: int) -> bool:
        tried = replace(run, slots=slots)
        return fits(predict(shape, tried, devices, calibration=calibration), devices, room)

    return _largest(SLOT_LIMIT, fitting)


def _largest(limit: int, fitting: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, if all smaller ones do; 0 = none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fitting(middle):
            low = middle
        else:
            high = middle - 1
    return low


def best_split(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device],
    *,
    calibration: Calibration | None = None,
) -> tuple[Decimal, ...]:
    """Shares under which the fullest GPU has the most room left: a small hill climb.

    Starts with shares by free memory and moves single layers between neighbours.
    """
    layers = shape.layers_all + 1
    free = sum(device.free_bytes for device in devices)
    counts = [max(1, layers * device.free_bytes // max(free, 1)) for device in devices]
    counts[-1] += layers - sum(counts)
    if min(counts) < 1:
        counts = [layers // len(devices)] * len(devices)
        counts[-1] += layers - sum(counts)

    even = replace(run, tensor_split=tuple(Decimal(count) for count in counts))
    buffers = compute_buffers(shape, even, place_layers(shape, even, devices), len(devices))

    def room(tried: Sequence[int]) -> int:
        split = tuple(Decimal(count) for count in tried)
        made = predict(
            shape,
            replace(run, tensor_split=split),
            devices,
            calibration=calibration,
            buffers=buffers,
        )
        return min(d.free_bytes - n for d, n in zip(devices, made.per_device, strict=True))

    best = room(counts)
    for _ in range(2 * layers):
        moves = []
        for giver in range(len(counts)):
            for taker in (giver - 1, giver + 1):
                if 0 <= taker < len(counts) and counts[giver] > 1:
                    moved = list(counts)
                    moved[giver] -= 1
                    moved[taker] += 1
                    moves.append((room(moved), moved))
        if not moves or max(moves)[0] <= best:
            break
        best, counts = max(moves)
    return tuple(Decimal(count) for count in counts)


def suggest(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device],
    room: Room,
    calibration: Calibration | None = None,
) -> list[Suggestion]:
    """Changes that make it fit, the smallest first: split, cache type, fewer slots, context."""
    found: list[Suggestion] = []
    least = predict(shape, replace(run, context=256, slots=1), devices, calibration=calibration)
    if devices:
        free = sum(device.free_bytes - room.reserve_bytes for device in devices)
        possible = sum(least.per_device) <= free
    else:
        possible = fits(least, devices, room)
    if not possible:
        return found  # not even the weights have a place

    def attempt(message: str, tried: RunShape, **options: Json) -> None:
        made = predict(shape, tried, devices, calibration=calibration)
        if fits(made, devices, room):
            found.append(Suggestion({**shared, **options}, made, message))

    base = run
    shared: dict[str, Json] = {}
    if len(devices) > 1:
        split = best_split(shape, run, devices, calibration=calibration)
        base = replace(run, tensor_split=split)
        shared["tensor_split"] = [int(share) for share in split]
        attempt(f"share the layers {':'.join(str(share) for share in split)}", base)
    if shape.has_cache and {run.cache_type_k, run.cache_type_v} != {"q8_0"}:
        attempt(
            "keep the cache in q8_0 (half the memory)",
            replace(base, cache_type_k="q8_0", cache_type_v="q8_0", flash_attention=True),
            cache_type_k="q8_0",
            cache_type_v="q8_0",
            flash_attention="on",
        )
    for slots in range(run.slots - 1, 0, -1):
        attempt(f"serve {slots} at once", replace(base, slots=slots), slots=slots)
        if found and found[-1].options.get("slots") == slots:
            break
    context = largest_context(shape, base, devices, room, calibration)
    if 0 < context < (run.context or shape.context_train):
        attempt(
            f"a context of {context} tokens a request",
            replace(base, context=context),
            context=context,
        )
    return found
