"""Where a model can sit: candidates and refusals for each host, each with its reason.

`place` answers before the work ("which hosts, which GPUs, what would have to stop"), from facts
that may be hours old or written by hand; it advises. `fits_beside` answers at an activation, from
facts that were read just now: beside the running generation, in its place, or not at all.

Memory that is promised is never given twice: what fits is computed against what is free, plus
what would be freed by stopping, minus a reserve for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, TypeVar

from mmadmin.core.build.recipe import Json
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import DoesNotFit, InvalidSpec, MmError
from mmadmin.core.fit.estimate import (
    Calibration,
    Device,
    Estimate,
    MemoryModel,
    Room,
    Suggestion,
    device_of,
)
from mmadmin.core.fit.facts import GpuFacts, HostFacts
from mmadmin.core.fit.rules import Case, Finding, judge, version_of

RESERVE_BYTES = 256 * 1024 * 1024
"""Kept free on each GPU: what the model of memory may be wrong by, and the driver's own swings."""
HOST_RESERVE_BYTES = 512 * 1024 * 1024
EXHAUSTIVE_LIMIT = 10
"""Up to this many running deployments, every choice of what to stop is tried, fewest first."""

Mode = Literal["overlap", "swap", "refuse"]
_WORSE: Sequence[Mode] = ("overlap", "swap", "refuse")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Running:
    """Something that occupies a host: a replica, with what it holds."""

    name: str
    """The deployment's name."""
    devices: Mapping[int, int]
    """GPU index → bytes."""
    host_bytes: int = 0
    """Main memory that is not a mapped file."""


@dataclass(frozen=True, slots=True)
class HostView:
    """A host as placement sees it."""

    name: str
    facts: HostFacts
    running: Sequence[Running] = ()
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host and GPUs that fit."""

    host: str
    devices: tuple[int, ...]
    """GPU indices; empty = the CPU."""
    estimate: Estimate
    stop: tuple[str, ...] = ()
    """Deployments that must be stopped to make room."""
    warnings: tuple[Finding, ...] = ()

    @property
    def message(self) -> str:
        """Where it fits."""
        where = f"GPU {', '.join(str(d) for d in self.devices)}" if self.devices else "the CPU"
        after = f" after stopping {', '.join(self.stop)}" if self.stop else ""
        return f"{self.host}: fits on {where}{after}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host does not do."""

    host: str
    reason: str
    remedy: str = ""
    findings: tuple[Finding, ...] = ()
    estimate: Estimate | None = None
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for all hosts; each host is in exactly one of the two."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]

    def best(self) -> Candidate:
        """The first candidate. Raises `DoesNotFit` with every host's reason."""
        if self.candidates:
            return self.candidates[0]
        raise DoesNotFit(
            "no host can take it: " + "; ".join(f"{r.host}: {r.reason}" for r in self.refusals),
            remedy=next((r.remedy for r in self.refusals if r.remedy), ""),
            hosts={r.host: r.reason for r in self.refusals},
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What shall be placed."""

    memory: MemoryModel
    header: Any
    """What the model's header says, as its format reads it."""
    options: Any
    """The engine's `[serve]` options."""
    case: Case
    """Engine, model and options; the host's part is filled in for each host."""
    build: Any = None
    """The engine's `[engine]` table; None = not known."""
    built_on: HostFacts | None = None
    """The host that built it; None = whichever it is placed on."""
    devices: tuple[int, ...] = ()
    """The GPUs that the deployment file names; empty = placement chooses."""
    attachment_bytes: int = 0
    overruled: Mapping[str, str] = field(default_factory=dict)

    def estimate(self, facts: HostFacts, gpus: Sequence[GpuFacts], known: Calibration) -> Estimate:
        """What it takes on these GPUs of a host. Raises `InvalidSpec`."""
        return self.memory.estimate(
            self.header,
            self.options,
            [device_of(gpu) for gpu in gpus],
            attachment_bytes=self.attachment_bytes,
            calibration=known,
            cpu_features=facts.cpu_features,
        )


def place(wanted: Wanted, hosts: Sequence[HostView]) -> Answer:
    """Candidates, the least disruptive and smallest first, and refusals in the hosts' order."""
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    for host in hosts:
        found = _on_host(wanted, host)
        if isinstance(found, Candidate):
            candidates.append(found)
        else:
            refusals.append(found)
    order = sorted(candidates, key=lambda c: (len(c.stop), len(c.devices) or 99, c.host))
    return Answer(tuple(order), tuple(refusals))


def _on_host(wanted: Wanted, host: HostView) -> Candidate | Refusal:
    try:
        choices = device_choices(wanted, host.facts)
    except DoesNotFit as error:
        return Refusal(host.name, error.message, error.remedy)
    best: Candidate | None = None
    worst: Refusal | None = None
    for chosen in choices:
        found = _on_devices(wanted, host, chosen)
        if isinstance(found, Refusal):
            worst = found
        elif best is None or len(found.stop) < len(best.stop):
            best = found
            if not found.stop:
                break
    if best is not None:
        return best
    if worst is None:
        raise AssertionError("a host without a choice was refused above")
    return worst


def device_choices(wanted: Wanted, facts: HostFacts) -> list[tuple[GpuFacts, ...]]:
    """Sets of GPUs worth trying: one architecture a set, the fewest first, the emptiest in them.

    The options may fix the number (a tensor split), the deployment file the GPUs themselves. Each
    set is in the order of indices, as shares have an order. Raises `DoesNotFit` when the host has
    no such set.
    """
    on_gpus = wanted.memory.uses_gpus(wanted.options, wanted.build, wanted.built_on or facts)
    if not on_gpus or not (facts.gpus or wanted.devices):
        return [()]
    count = wanted.memory.device_count(wanted.options)
    if wanted.devices:
        return [_named(wanted.devices, facts)]
    kinds: dict[int, list[GpuFacts]] = {}
    for gpu in facts.gpus:
        kinds.setdefault(gpu.architecture, []).append(gpu)
    choices: list[tuple[GpuFacts, ...]] = []
    for size in [count] if count else range(1, len(facts.gpus) + 1):
        for gpus in kinds.values():
            if size > len(gpus):
                continue
            emptiest = sorted(gpus, key=lambda g: (-g.available_bytes, g.index))[:size]
            largest = sorted(gpus, key=lambda g: (-g.memory_total_bytes, g.index))[:size]
            for picked in (emptiest, largest):
                choice = tuple(sorted(picked, key=lambda g: g.index))
                if choice not in choices:
                    choices.append(choice)
    if not choices:
        raise DoesNotFit(
            f"the options want {count} GPUs of one kind, and the host has "
            f"{max(map(len, kinds.values()))}",
            remedy="change the number of GPUs in [serve], or choose another host",
        )
    return choices


def _named(devices: Sequence[int], facts: HostFacts) -> tuple[GpuFacts, ...]:
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    missing = [index for index in devices if index not in by_index]
    if missing:
        raise DoesNotFit(
            f"there is no GPU {missing[0]} on this host",
            remedy=f"`devices` may name GPUs 0 to {len(by_index) - 1}"
            if by_index
            else "remove `devices`: the host has no GPUs",
        )
    return tuple(by_index[index] for index in devices)


def _on_devices(wanted: Wanted, host: HostView, gpus: Sequence[GpuFacts]) -> Candidate | Refusal:
    case = with_host(wanted.case, host.facts, gpus)
    verdict = judge(case, wanted.overruled)
    if verdict.refusals:
        first = verdict.refusals[0]
        return Refusal(host.name, first.message, first.remedy, verdict.findings)
    try:
        made = wanted.estimate(host.facts, gpus, host.calibration)
    except InvalidSpec as error:
        return Refusal(host.name, error.message, error.remedy)
    needs = dict(zip((gpu.index for gpu in gpus), made.per_device, strict=True))
    stop = fewest_to_stop(needs, made.resident_bytes, host)
    if stop is None:
        return _too_large(wanted, host, gpus, made)
    return Candidate(
        host=host.name,
        devices=tuple(gpu.index for gpu in gpus),
        estimate=made,
        stop=stop,
        warnings=verdict.warnings,
    )


def fewest_to_stop(
    needs: Mapping[int, int], host_bytes: int, host: HostView
) -> tuple[str, ...] | None:
    """The fewest running deployments whose end makes room; None = not even all of them."""
    free = {gpu.index: gpu.available_bytes for gpu in host.facts.gpus}
    memory = host.facts.memory_available_bytes

    def enough(stopped: Iterable[Running]) -> bool:
        gone = list(stopped)
        room = memory + sum(r.host_bytes for r in gone)
        if host_bytes + HOST_RESERVE_BYTES > room:
            return False
        return all(
            need + RESERVE_BYTES <= free[index] + sum(r.devices.get(index, 0) for r in gone)
            for index, need in needs.items()
            if need
        )

    return _fewest(list(host.running), enough)


def _fewest(
    running: Sequence[Running], enough: Callable[[Iterable[Running]], bool]
) -> tuple[str, ...] | None:
    if not enough(running):
        return () if enough(()) else None
    if len(running) <= EXHAUSTIVE_LIMIT:
        for count in range(len(running) + 1):
            sets = (c for c in combinations(running, count) if enough(c))
            chosen = min(sets, key=_held, default=None)
            if chosen is not None:
                return tuple(r.name for r in chosen)
    kept = list(running)
    for one in sorted(running, key=lambda r: _held([r])):
        fewer = [r for r in kept if r is not one]
        if enough(fewer):
            kept = fewer
    return tuple(r.name for r in kept)


def _held(running: Iterable[Running]) -> int:
    return sum(sum(r.devices.values()) + r.host_bytes for r in running)


def _too_large(wanted: Wanted, host: HostView, gpus: Sequence[GpuFacts], made: Estimate) -> Refusal:
    # what could be free at best: running deployments can be stopped
    held = {gpu.index: sum(r.devices.get(gpu.index, 0) for r in host.running) for gpu in gpus}
    best = [
        Device(
            gpu.architecture,
            gpu.memory_total_bytes,
            gpu.available_bytes + held[gpu.index],
            gpu.name,
        )
        for gpu in gpus
    ]
    for gpu, device, need in zip(gpus, best, made.per_device, strict=True):
        if need + RESERVE_BYTES > device.free_bytes:
            free = bytes_text(device.free_bytes)
            reason = f"GPU {gpu.index} needs {bytes_text(need)} and could have {free}"
            break
    else:
        reason = (
            f"it needs {bytes_text(made.resident_bytes)} of main memory and "
            f"{bytes_text(host.facts.memory_available_bytes)} are available"
        )
    memory = host.facts.memory_available_bytes + sum(r.host_bytes for r in host.running)
    found = wanted.memory.suggest(
        wanted.header,
        wanted.options,
        best,
        Room(RESERVE_BYTES, memory - HOST_RESERVE_BYTES),
        attachment_bytes=wanted.attachment_bytes,
        calibration=host.calibration,
    )
    remedy = found[0].message if found else "take a smaller quant, or a host with more memory"
    return Refusal(host.name, reason, remedy, estimate=made, suggestions=tuple(found))


def with_host(case: Case, facts: HostFacts, gpus: Sequence[GpuFacts]) -> Case:
    """The case with the host's part filled in."""
    return replace(
        case,
        architectures=tuple(gpu.architecture for gpu in gpus),
        visible_gpus=len(gpus) if gpus else None,
        cuda=case.cuda or (version_of(facts.cuda) if gpus else None),
        driver=version_of(facts.driver) if gpus else None,
    )


# -- at an activation


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that an engine will hold on certain GPUs of its host."""

    devices: tuple[int, ...]
    """GPU indices."""
    per_device: tuple[int, ...]
    """Bytes on each."""
    host_bytes: int
    resident_bytes: int
    """Main memory that it cannot do without."""
    own_bytes: int
    """Main memory besides the mapped file: what its end frees."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for the generation's record."""
        return {
            "devices": list(self.devices),
            "per_device": list(self.per_device),
            "host_bytes": self.host_bytes,
            "resident_bytes": self.resident_bytes,
            "own_bytes": self.own_bytes,
        }

    def on(self, devices: Sequence[int]) -> Footprint:
        """The same on other GPUs of the same kind, as many."""
        return replace(self, devices=tuple(devices))

    def running(self, name: str, pid: int | None, facts: HostFacts) -> Running:
        """What it holds: by the driver where it names the process, else as predicted."""
        held = {gpu.index: size for gpu in facts.gpus if pid and (size := gpu.held_by(pid))}
        predicted = dict(zip(self.devices, self.per_device, strict=True))
        return Running(name, held or predicted, self.own_bytes)


def footprint(made: Estimate, devices: Sequence[int]) -> Footprint:
    """The footprint of an estimate on GPUs of a host, by index."""
    return Footprint(
        devices=tuple(devices),
        per_device=made.per_device,
        host_bytes=made.host_bytes,
        resident_bytes=made.resident_bytes,
        own_bytes=made.own_bytes,
    )


def footprint_from_json(data: Mapping[str, Any]) -> Footprint:
    """The inverse of `Footprint.as_json`."""
    return Footprint(
        devices=tuple(data["devices"]),
        per_device=tuple(data["per_device"]),
        host_bytes=data["host_bytes"],
        resident_bytes=data["resident_bytes"],
        own_bytes=data["own_bytes"],
    )


def footprints_as_json(known: Sequence[Footprint]) -> dict[str, Json]:
    """Footprints on different sets of GPUs, for the generation's record."""
    return {"alternatives": [one.as_json() for one in known]}


def footprints_from_json(data: Mapping[str, Any]) -> list[Footprint]:
    """The inverse of `footprints_as_json`; earlier records hold one footprint alone."""
    return [footprint_from_json(one) for one in data.get("alternatives", [data])]


def footprint_on(known: Sequence[Footprint], devices: Sequence[int] | None) -> Footprint | None:
    """What is known for these GPUs, or for as many others; without GPUs, the first that is."""
    if devices is None:
        return known[0] if known else None
    as_many = [one for one in known if len(one.devices) == len(devices)]
    exact = [one for one in as_many if one.devices == tuple(devices)]
    return (exact or as_many)[0].on(devices) if as_many else None


def everywhere(known: Sequence[Footprint], facts: HostFacts) -> list[Footprint]:
    """Footprints on every set of GPUs that they hold for, in the order in which seats are tried.

    One is known for a number of like GPUs: it holds for any as many of that kind.
    """
    kinds: dict[int, list[GpuFacts]] = {}
    for gpu in facts.gpus:
        kinds.setdefault(gpu.architecture, []).append(gpu)
    architecture = {gpu.index: gpu.architecture for gpu in facts.gpus}
    free = {gpu.index: gpu.available_bytes for gpu in facts.gpus}
    found: dict[tuple[int, ...], Footprint] = {}
    for one in known:
        kind = {architecture.get(index, -1) for index in one.devices}
        like = kinds.get(kind.pop(), []) if len(kind) == 1 else []
        sets = combinations((gpu.index for gpu in like), len(one.devices)) if like else ()
        for devices in (one.devices, *sets):
            found.setdefault(devices, one.on(devices))
    return sorted(
        found.values(),
        key=lambda f: (len(f.devices), -sum(free.get(n, 0) for n in f.devices), f.devices),
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """Whether a generation can start while another one runs, and on which GPUs."""

    mode: Mode
    message: str
    short_bytes: Mapping[int, int] = field(default_factory=dict)
    """GPU index → bytes that are missing for an overlap; -1 = main memory."""
    devices: tuple[int, ...] = ()
    """The GPUs that it would sit on."""

    def as_json(self) -> dict[str, Json]:
        """The details of a refusal."""
        return {
            "mode": self.mode,
            "short_bytes": {str(index): size for index, size in self.short_bytes.items()},
            "devices": list(self.devices),
        }


def seats(
    wanted: Wanted, facts: HostFacts, known: Calibration, leaving: Running | None = None
) -> Iterator[Footprint]:
    """The footprint on each set of GPUs worth trying, now and once `leaving` has ended.

    Raises `DoesNotFit` when the host has no such GPUs or a rule refuses them all, `InvalidSpec`
    when no number of them goes with the options.
    """
    after = freed(facts, leaving) if leaving else facts
    indices = [
        tuple(gpu.index for gpu in choice)
        for view in ((facts, after) if leaving else (facts,))
        for choice in device_choices(wanted, view)
    ]
    refused: MmError | None = None
    usable = False
    for chosen in dict.fromkeys(indices):
        gpus = [gpu for gpu in after.gpus if gpu.index in chosen]
        gpus.sort(key=lambda gpu: chosen.index(gpu.index))
        verdict = judge(with_host(wanted.case, facts, gpus), wanted.overruled)
        try:
            if verdict.refusals:
                first = verdict.refusals[0]
                raise DoesNotFit(first.message, remedy=first.remedy, rules=[first.rule])
            made = wanted.estimate(facts, gpus, known)
        except MmError as error:
            refused = error
            continue
        usable = True
        yield footprint(made, chosen)
    if refused is not None and not usable:
        raise refused


def choose_seat(
    footprints: Iterable[Footprint], facts: HostFacts, leaving: Running | None = None
) -> Beside:
    """The best answer among these: an overlap, else a swap, else the refusal that lacks least.

    `facts` must have been read just now, with `leaving` running. The first of equals counts.
    """
    best: Beside | None = None
    for one in footprints:
        found = fits_beside(one, facts, leaving)
        if found.mode == "overlap":
            return found
        if best is None or _rank(found) < _rank(best):
            best = found
    if best is None:
        raise AssertionError("there is always a choice, at least the CPU")
    return best


def _rank(room: Beside) -> tuple[int, int]:
    return _WORSE.index(room.mode), sum(room.short_bytes.values())


def fits_beside(wanted: Footprint, facts: HostFacts, leaving: Running | None = None) -> Beside:
    """Overlap, swap or refuse: `facts` must have been read just now, with `leaving` running.

    `leaving` is what the new generation replaces, with what it holds; None = nothing runs.
    """
    free = {gpu.index: gpu.available_bytes for gpu in facts.gpus}
    own, devices = wanted.resident_bytes, wanted.devices
    missing = [index for index in devices if index not in free]
    if missing:
        return Beside("refuse", f"there is no GPU {missing[0]} on this host", devices=devices)
    needs = dict(zip(devices, wanted.per_device, strict=True))
    short = {
        index: need + RESERVE_BYTES - free[index]
        for index, need in needs.items()
        if need and need + RESERVE_BYTES > free[index]
    }
    if own + HOST_RESERVE_BYTES > facts.memory_available_bytes:
        short[-1] = own + HOST_RESERVE_BYTES - facts.memory_available_bytes
    if not short:
        message = "both fit: the new one starts beside the old one"
        return Beside("overlap", message, devices=devices)
    freed = dict(leaving.devices) if leaving else {}
    if leaving:
        freed[-1] = leaving.host_bytes
    still = {index: size - freed.get(index, 0) for index, size in short.items()}
    worst = max(still, key=lambda index: still[index])
    if still[worst] <= 0:
        return Beside(
            "swap",
            f"{_place(worst)} is short of {bytes_text(short[worst])} while the old one runs: "
            "it is stopped first",
            short,
            devices,
        )
    steps = "".join(
        f"; {one.owner} holds {bytes_text(one.memory_bytes)} until it is built"
        for gpu in facts.gpus
        if gpu.index == worst
        for one in gpu.leases
    )
    return Beside(
        "refuse",
        f"{_place(worst)} is short of {bytes_text(still[worst])}"
        + (" even after the old one has stopped" if leaving else "")
        + steps,
        short,
        devices,
    )


def promised(facts: HostFacts, holders: Iterable[Running]) -> HostFacts:
    """The host less what was promised to these and is not held yet."""
    gpus = {gpu.index: gpu for gpu in facts.gpus}
    memory = facts.memory_available_bytes
    for one in holders:
        memory -= one.host_bytes
        for index, size in one.devices.items():
            if index in gpus:
                free = max(gpus[index].memory_free_bytes - size, 0)
                gpus[index] = replace(gpus[index], memory_free_bytes=free)
    return replace(facts, memory_available_bytes=max(memory, 0), gpus=tuple(gpus.values()))


def freed(facts: HostFacts, running: Running) -> HostFacts:
    """The host once that engine has ended."""
    return replace(
        facts,
        memory_available_bytes=facts.memory_available_bytes + running.host_bytes,
        gpus=tuple(
            replace(
                gpu, memory_free_bytes=gpu.memory_free_bytes + running.devices.get(gpu.index, 0)
            )
            for gpu in facts.gpus
        ),
    )


def make_room(
    look: Callable[[Sequence[T]], Beside], may_end: Sequence[T], *, wanted: str
) -> tuple[Beside, Sequence[T]]:
    """The room that can be had by ending some of these, and which: none that does not help.

    `look` says what room there is once those that it is given have ended; `wanted` is the
    `activation.mode` of the file: who asks for a swap needs no room for both.
    """
    enough = ("overlap", "swap") if wanted == "swap" else ("overlap",)
    best = room = look(())
    end = may_end[:0]
    for count in range(1, len(may_end) + 1):
        if best.mode in enough:
            break
        room = look(may_end[:count])
        if _WORSE.index(room.mode) < _WORSE.index(best.mode):
            best, end = room, may_end[:count]
    if best.mode == "refuse":
        return room, end  # the message is that of the look without any of them
    for one in end[:-1]:  # the last one made the difference
        rest = [other for other in end if other is not one]
        room = look(rest)
        if room.mode == best.mode:
            best, end = room, rest
    return best, end


def _place(index: int) -> str:
    return "main memory" if index < 0 else f"GPU {index}"
