"""Where a model can sit: candidates and refusals for each host, each with its reason.

`place` answers before the work ("which hosts, which GPUs, what would have to stop"), from facts
that may be hours old or written by hand; it advises. `fits_beside` answers at an activation, from
facts that were read just now: beside the running generation, in its place, or not at all.

Memory that is promised is never given twice: what fits is computed against what is free, plus
what would be freed by stopping, minus a reserve for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal, TypeVar

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.memory import Calibration, Prediction, predict
from mmadmin.core.engines.llama_server.run_shape import Device, RunShape, device_of
from mmadmin.core.engines.llama_server.suggest import Suggestion, suggest
from mmadmin.core.engines.protocol import Needs
from mmadmin.core.errors import DoesNotFit, InvalidSpec
from mmadmin.core.fit.facts import GpuFacts, HostFacts
from mmadmin.core.fit.rules import Case, Finding, Version, judge, version_of
from mmadmin.core.formats.gguf.shape import ModelShape

RESERVE_BYTES = 256 * 1024 * 1024
"""Kept free on each GPU: what the model of memory may be wrong by, and the driver's own swings."""
HOST_RESERVE_BYTES = 512 * 1024 * 1024
EXHAUSTIVE_LIMIT = 10
"""Up to so many running deployments every choice of what to stop is tried, fewest first."""

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
    """A host and GPUs that would do."""

    host: str
    devices: tuple[int, ...]
    """GPU indices; empty = the CPU."""
    prediction: Prediction
    stop: tuple[str, ...] = ()
    """Deployments that must be stopped to make room."""
    warnings: tuple[Finding, ...] = ()

    @property
    def words(self) -> str:
        """One sentence for people."""
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
    prediction: Prediction | None = None
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

    shape: ModelShape
    run: RunShape
    case: Case
    """Engine, model and options; the host's part is filled in for each host."""
    overruled: Mapping[str, str] = field(default_factory=dict)


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
    on_cpu = wanted.run.gpu_layers == 0 or not host.facts.gpus
    choices = [()] if on_cpu else device_choices(host.facts, wanted.run)
    if not choices:
        return Refusal(
            host.name,
            f"it has {len(host.facts.gpus)} GPUs of one kind at most, the tensor split wants "
            f"{len(wanted.run.tensor_split)}",
            "change serve.tensor_split, or choose another host",
        )
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


def device_choices(facts: HostFacts, run: RunShape) -> list[tuple[GpuFacts, ...]]:
    """Sets of GPUs worth trying: one architecture a set, the fewest first, the emptiest in them.

    With a tensor split the number is given, and the order is by index, as shares have an order.
    """
    kinds: dict[int, list[GpuFacts]] = {}
    for gpu in facts.gpus:
        kinds.setdefault(gpu.architecture, []).append(gpu)
    sizes = [len(run.tensor_split)] if run.tensor_split else range(1, len(facts.gpus) + 1)
    choices: list[tuple[GpuFacts, ...]] = []
    for size in sizes:
        for gpus in kinds.values():
            if size > len(gpus):
                continue
            emptiest = sorted(gpus, key=lambda g: (-g.memory_free_bytes, g.index))[:size]
            largest = sorted(gpus, key=lambda g: (-g.memory_total_bytes, g.index))[:size]
            for picked in (emptiest, largest):
                choice = tuple(sorted(picked, key=lambda g: g.index))
                if choice not in choices:
                    choices.append(choice)
    return choices


def _on_devices(wanted: Wanted, host: HostView, gpus: Sequence[GpuFacts]) -> Candidate | Refusal:
    case = _with_host(wanted.case, host.facts, gpus)
    verdict = judge(case, wanted.overruled)
    if verdict.refusals:
        first = verdict.refusals[0]
        return Refusal(host.name, first.words, first.remedy, verdict.findings)
    devices = [device_of(gpu) for gpu in gpus]
    try:
        prediction = predict(
            wanted.shape,
            wanted.run,
            devices,
            calibration=host.calibration,
            cpu_features=host.facts.cpu_features,
        )
    except InvalidSpec as error:
        return Refusal(host.name, error.message, error.remedy)
    needs = dict(zip((gpu.index for gpu in gpus), prediction.per_device, strict=True))
    own = resident_bytes(prediction)
    stop = fewest_to_stop(needs, own, host)
    if stop is None:
        return _too_large(wanted, host, gpus, prediction)
    return Candidate(
        host=host.name,
        devices=tuple(gpu.index for gpu in gpus),
        prediction=prediction,
        stop=stop,
        warnings=verdict.warnings,
    )


def resident_bytes(prediction: Prediction) -> int:
    """Main memory that must be there: without the mapped file, which the kernel may drop.

    On a host without GPUs the file counts too: dropping it would mean reading it for each token.
    """
    if prediction.devices:
        return prediction.host_bytes - prediction.host.get("mapped", 0)
    return prediction.host_bytes


def fewest_to_stop(
    needs: Mapping[int, int], host_bytes: int, host: HostView
) -> tuple[str, ...] | None:
    """The fewest running deployments whose end makes room; None = not even all of them."""
    free = {gpu.index: gpu.memory_free_bytes for gpu in host.facts.gpus}
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


def _too_large(
    wanted: Wanted, host: HostView, gpus: Sequence[GpuFacts], prediction: Prediction
) -> Refusal:
    # what could be free at best: running deployments can be stopped
    held = {gpu.index: sum(r.devices.get(gpu.index, 0) for r in host.running) for gpu in gpus}
    best = [
        Device(
            gpu.architecture,
            gpu.memory_total_bytes,
            gpu.memory_free_bytes + held[gpu.index],
            gpu.name,
        )
        for gpu in gpus
    ]
    for gpu, device, need in zip(gpus, best, prediction.per_device, strict=True):
        if need + RESERVE_BYTES > device.free_bytes:
            reason = f"GPU {gpu.index} needs {_gib(need)} and could have {_gib(device.free_bytes)}"
            break
    else:
        own = resident_bytes(prediction)
        reason = (
            f"it needs {_gib(own)} of main memory and "
            f"{_gib(host.facts.memory_available_bytes)} are available"
        )
    memory = host.facts.memory_available_bytes + sum(r.host_bytes for r in host.running)
    found = suggest(
        wanted.shape,
        wanted.run,
        best,
        reserve_bytes=RESERVE_BYTES,
        host_room_bytes=memory - HOST_RESERVE_BYTES,
        calibration=host.calibration,
    )
    remedy = found[0].words if found else "take a smaller quant, or a host with more memory"
    return Refusal(host.name, reason, remedy, prediction=prediction, suggestions=tuple(found))


def _with_host(case: Case, facts: HostFacts, gpus: Sequence[GpuFacts]) -> Case:
    """The case with the host's part filled in."""
    return Case(
        **{name: getattr(case, name) for name in Case.__dataclass_fields__}
        | {
            "architectures": tuple(gpu.architecture for gpu in gpus),
            "visible_gpus": len(gpus) if gpus else None,
            "cuda": case.cuda or (version_of(facts.cuda) if gpus else None),
        }
    )


def case_of(
    engine: str,
    shape: ModelShape,
    run: RunShape,
    *,
    engine_version: Version | None = None,
    files: Iterable[str] = (),
) -> Case:
    """What the rules need to know of a GGUF deployment."""
    return Case(
        engine=engine,
        engine_version=engine_version,
        model_format="gguf",
        model_architecture=shape.architecture,
        weight_types=frozenset(weight.type for weight in shape.weights),
        cache_type=run.cache_type_k,
        files=frozenset(files),
        tensor_split=run.tensor_split,
        total_context=(run.context or shape.context_train) * run.slots,
        wanted_context=run.context or shape.context_train,
        slots=run.slots,
        trained_context=shape.context_train or None,
    )


# -- at an activation


@dataclass(frozen=True, slots=True)
class Beside:
    """Whether a generation can start while another one runs."""

    mode: Mode
    words: str
    short_bytes: Mapping[int, int] = field(default_factory=dict)
    """GPU index → bytes that are missing for an overlap; -1 = main memory."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for the activation's record."""
        return {
            "mode": self.mode,
            "words": self.words,
            "short_bytes": {str(index): size for index, size in self.short_bytes.items()},
        }


def fits_beside(
    wanted: Needs,
    devices: Sequence[int],
    facts: HostFacts,
    leaving: Running | None = None,
    *,
    resident: int | None = None,
) -> Beside:
    """Overlap, swap or refuse: `facts` must have been read just now, with `leaving` running.

    `devices` are the GPU indices of `wanted.per_device`; `resident` is the main memory that
    `wanted` cannot do without (default: all that it names). `leaving` is what the new generation
    replaces, with what it holds; None = nothing runs.
    """
    free = {gpu.index: gpu.memory_free_bytes for gpu in facts.gpus}
    own = wanted.host_bytes if resident is None else resident
    missing = [index for index in devices if index not in free]
    if missing:
        return Beside("refuse", f"there is no GPU {missing[0]} on this host")
    needs = dict(zip(devices, wanted.per_device, strict=False))
    short = {
        index: need + RESERVE_BYTES - free[index]
        for index, need in needs.items()
        if need and need + RESERVE_BYTES > free[index]
    }
    if own + HOST_RESERVE_BYTES > facts.memory_available_bytes:
        short[-1] = own + HOST_RESERVE_BYTES - facts.memory_available_bytes
    if not short:
        return Beside("overlap", "both fit: the new one starts beside the old one")
    freed = dict(leaving.devices) if leaving else {}
    if leaving:
        freed[-1] = leaving.host_bytes
    still = {index: size - freed.get(index, 0) for index, size in short.items()}
    worst = max(still, key=lambda index: still[index])
    if still[worst] <= 0:
        return Beside(
            "swap",
            f"{_place(worst)} is short of {_gib(short[worst])} while the old one runs: "
            "it is stopped first",
            short,
        )
    return Beside(
        "refuse",
        f"{_place(worst)} is short of {_gib(still[worst])}"
        + (" even after the old one has stopped" if leaving else ""),
        short,
    )


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
        return room, end  # in the words of the look without any of them
    for one in end[:-1]:  # the last one made the difference
        rest = [other for other in end if other is not one]
        room = look(rest)
        if room.mode == best.mode:
            best, end = room, rest
    return best, end


def _place(index: int) -> str:
    return "main memory" if index < 0 else f"GPU {index}"


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"
