"""What an activation will do: overlap or swap, how long requests wait, what ends.

The preflight of an activation decides with facts that it reads itself, a moment before it acts.
This is the same arithmetic on the facts that the host last reported: it advises, and says of when
its facts are. A generation's `Footprint` is predicted once, when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import Conflict
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.placement import (
    Beside,
    Footprint,
    HostView,
    Running,
    choose_seat,
    fewest_to_stop,
    freed,
    make_room,
)
from mmadmin.core.generations.activation import Mode, choose_mode

USUAL_DISK = 500 * 1024 * 1024
"""Bytes a second at which a model is read where the host has never loaded one."""
START_S = 2.0
"""What a start and its proof take besides reading the model."""

Outlook = Literal["overlap", "swap", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Load:
    """How long an engine takes until it answers."""

    seconds: float
    measured: bool
    """By this very generation; else estimated from its size."""


def load_time(
    report: Mapping[str, Any] | None, size_bytes: int, bytes_per_s: float | None = None
) -> Load:
    """From a generation's own probe report, else from its size and how fast its host reads."""
    measured = ((report or {}).get("measured") or {}).get("load_ms")
    if measured:
        return Load(measured / 1000, measured=True)
    return Load(START_S + size_bytes / (bytes_per_s or USUAL_DISK), measured=False)


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is before the act."""

    target: str
    """`name/number`."""
    needs: Sequence[Footprint]
    """On each set of GPUs that it could sit on; empty = it was never predicted."""
    mode: str
    """`activation.mode` of its file."""
    load: Load
    drain_s: int
    """How long running requests may go on."""
    facts: HostFacts | None
    """As the host last reported; None = it never did."""
    live: str = ""
    """The generation that is live with an engine; empty = none is."""
    leaving: Running | None = None
    """What that engine holds; None = nothing is live, or it is not known."""
    others: Sequence[Running] = ()
    """The engines of other deployments on the host."""
    trials: Sequence[Running] = ()
    """Engines on trial on the host, by generation: they end where that makes room, and one of the
    target's own deployment (`name/…`) ends in any case."""
    tried: bool = False
    """The target itself is on trial and answers: its engine is taken over."""
    missing: tuple[str, ...] | None = ()
    """Steps whose objects the store no longer has; None = it cannot be seen from here."""
    name: str = ""
    """What clients call the target; empty = what they call the live one."""
    namesake: str = ""
    """Another deployment that clients call so."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What will happen."""

    outlook: Outlook
    message: str
    """Whether both fit, and what follows."""
    waits_s: float | None
    """How long new requests wait; 0 = not at all, None = it cannot be told."""
    drain_s: int
    """How long running requests may still go on; in a swap new ones wait for them, too."""
    load: Load
    ends: tuple[str, ...]
    """Generations whose engines end by it, trials among them."""
    devices: tuple[int, ...] | None
    """The GPUs that it would sit on; None = it cannot be told."""
    stop_first: tuple[str, ...]
    """Deployments that a person must stop first, the fewest that make room."""
    build_first: tuple[str, ...] | None
    """Steps that must be built again first; None = it cannot be seen from here."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for the API and `--json`."""
        return {
            "outlook": self.outlook,
            "message": self.message,
            "waits_ms": None if self.waits_s is None else round(self.waits_s * 1000),
            "drain_s": self.drain_s,
            "load_ms": round(self.load.seconds * 1000),
            "load_measured": self.load.measured,
            "ends": list(self.ends),
            "devices": None if self.devices is None else list(self.devices),
            "stop_first": list(self.stop_first),
            "build_first": None if self.build_first is None else list(self.build_first),
        }


def preview(now: Situation) -> Preview:
    """What making `now.target` live will do. Changes nothing, reads nothing."""
    known = Preview(
        outlook="unknown",
        message="",
        waits_s=None,
        drain_s=now.drain_s if now.live else 0,
        load=now.load,
        ends=(now.live,) if now.live else (),
        devices=None,
        stop_first=(),
        build_first=now.missing,
    )
    if now.missing:
        count = f"{len(now.missing)} object{'s' if len(now.missing) > 1 else ''}"
        message = f"the store no longer has {count} that it needs: build it again first"
        return replace(known, outlook="refused", message=message, ends=(), waits_s=0.0)
    if now.namesake:
        message = (
            f"clients call the deployment {now.namesake} {now.name!r}: rename one of them first"
        )
        return replace(known, outlook="refused", message=message, ends=(), waits_s=0.0)
    if now.tried:
        message = f"its engine runs already, on trial: it takes over from {now.live or 'nothing'}"
        none = Load(0.0, measured=True)
        return replace(known, outlook="overlap", message=message, waits_s=0.0, load=none)
    if not now.needs or now.facts is None:
        lacks = "its memory was never predicted" if now.facts else "its host has not reported yet"
        return replace(known, message=f"{lacks}, so the preflight decides between overlap and swap")
    return _with_memory(now, now.facts, known)


def _with_memory(now: Situation, facts: HostFacts, known: Preview) -> Preview:
    deployment = now.target.rpartition("/")[0]
    own = [trial for trial in now.trials if trial.name.rpartition("/")[0] == deployment]
    facts = _without(facts, own)
    others = [trial for trial in now.trials if trial not in own]
    room, needed = make_room(
        lambda gone: choose_seat(now.needs, _without(facts, gone), now.leaving),
        others,
        wanted=now.mode,
    )
    found = _with_room(now, room, known, lambda: _to_stop(now, _without(facts, others)))
    if found.outlook == "refused" or not (own or needed):
        return found
    names = tuple(trial.name for trial in (*own, *needed))
    return replace(
        found,
        message=f"{found.message}; the trial of {' and '.join(names)} ends",
        ends=found.ends + names,
    )


def _without(facts: HostFacts, gone: Iterable[Running]) -> HostFacts:
    """The host once these have ended."""
    return reduce(freed, gone, facts)


def _with_room(
    now: Situation, room: Beside, known: Preview, to_stop: Callable[[], tuple[str, ...]]
) -> Preview:
    if room.mode == "refuse" and now.live and now.leaving is None:
        message = (
            f"{room.message} now, and what {now.live} holds is not known: the preflight decides"
        )
        return replace(known, message=message)
    if room.mode == "refuse":
        stop = to_stop()
        message = room.message + (f"; stop {' and '.join(stop)} first" if stop else "")
        return replace(
            known, outlook="refused", message=message, ends=(), waits_s=0.0, stop_first=stop
        )
    known = replace(known, devices=room.devices)
    try:
        mode = choose_mode(
            now.mode, has_previous=bool(now.live), fits_beside=room.mode == "overlap"
        )
    except Conflict as error:
        message = f"{error.message}; {error.remedy}"
        return replace(known, outlook="refused", message=message, ends=(), waits_s=0.0)
    if not now.live:
        message = "nothing is live and memory suffices: it serves once its probes pass"
        return replace(known, outlook="overlap", message=message, waits_s=now.load.seconds)
    if mode is Mode.OVERLAP:
        message = (
            f"both fit in memory: the new generation starts alongside {now.live}, "
            "which keeps serving until the switch"
        )
        return replace(known, outlook="overlap", message=message, waits_s=0.0)
    why = (
        room.message if room.mode == "swap" else f"its file requires a swap: {now.live} stops first"
    )
    return replace(known, outlook="swap", message=why, waits_s=now.load.seconds)


def _to_stop(now: Situation, facts: HostFacts) -> tuple[str, ...]:
    """The fewest other deployments whose end makes room, once the live engine has gone."""
    if now.leaving is not None:
        facts = freed(facts, now.leaving)
    host = HostView("", facts, now.others)
    ways = [
        fewest_to_stop(
            dict(zip(one.devices, one.per_device, strict=True)), one.resident_bytes, host
        )
        for one in now.needs
    ]
    return min((way for way in ways if way), key=len, default=())
