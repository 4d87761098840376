"""Will it fit? The memory model and the rules, asked about real files, repositories and hosts.

Everything here looks (headers, the hub's listing, what processes hold) and answers as data; the
answers themselves are made in the core (`memory`, `rules`, `placement`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mmadmin.core import catalog
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import HubSource, Json, PathSource
from mmadmin.core.engines.protocol import TEMPLATE, Engine, Options, System
from mmadmin.core.errors import DoesNotFit, InvalidModel, InvalidSpec, NotFound
from mmadmin.core.fit.estimate import (
    Calibration,
    Estimate,
    Row,
    compare_buffers,
    compare_devices,
    device_of,
    learn,
)
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.placement import (
    Answer,
    HostView,
    Refusal,
    Running,
    Wanted,
    place,
    with_host,
)
from mmadmin.core.fit.rules import judge, version_of
from mmadmin.core.formats.protocol import FileSet, ModelFormat, ModelHeader, RepoFile
from mmadmin.core.home import Home
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec
from mmadmin.core.store import Store
from mmadmin.host import process_tree
from mmadmin.host.engine_process import program
from mmadmin.host.supervisor import Supervisor

if TYPE_CHECKING:
    from mmadmin.host.hub import Hub
    from mmadmin.host.hub_browser import Listing

LEAST_SHARE = 0.5
"""Of what was planned on a GPU, the part that an engine holds at least once it has loaded."""
READ_ATTEMPTS = 3
"""So many sets of a repository are tried before it is taken for one without language models."""
log_damage = logging.getLogger(__name__)
MODEL = "model"
"""The pin that holds the model's own files; others of its part are loaded beside it."""


@dataclass(frozen=True, slots=True)
class Look:
    """A deployment's model as far as its header says."""

    header: ModelHeader
    size_bytes: int
    """Bytes to fetch."""
    where: str
    """The repository at its commit, or the file."""
    label: str
    """The quant or file that was chosen."""
    listing: Listing | None = None
    attachment_bytes: int = 0
    """Size of the files that are loaded besides the model."""


def look(spec: Spec, hub: Hub | None = None) -> Look:
    """Read the header of a spec's model, where that needs no download. Blocking.

    A hub repository is read by ranges, a path directly. Raises `InvalidSpec` for a package or an
    address, whose header cannot be seen before the download (then: `stored`), and what `browse`
    raises.
    """
    from mmadmin.host.hub import Hub
    from mmadmin.host.hub_browser import browse, read_header

    engine = catalog.engine(spec.engine_kind)
    model, *attached = (pin for pin in engine.pins(spec) if pin.part == MODEL)
    origin = model.origin
    if origin is not None and origin.source == "path":
        return _look_here(spec, engine, Path(origin.path), attached)
    if origin is None or origin.source != "hub":
        raise InvalidSpec(
            "the header of this model cannot be seen before it is downloaded",
            remedy="to have it read in the store, fetch and build it first",
            field="model.source",
            command="mm build FILE",
        )
    hub = hub or Hub.from_env()
    found = browse(hub, origin.repo, origin.revision)
    listed = {file.path: file for file in found.files}
    chosen = _chosen_set(_format(engine), [listed[path] for path in _choose(model, found.files)])
    glimpse = read_header(hub, found.repo, found.commit, chosen)
    beside = [listed[path] for pin in attached for path in _choose(pin, found.files)]
    return Look(
        engine.expected_header(glimpse.header, spec),
        chosen.size_bytes,
        f"{found.repo}@{found.commit[:12]}",
        chosen.label,
        found,
        sum(file.size_bytes for file in beside),
    )


def _look_here(spec: Spec, engine: Engine, path: Path, attached: Sequence[PinRequest]) -> Look:
    """As `look`, at files of this host."""
    kind = _format(engine)
    if path.is_dir():
        files = [
            RepoFile(f.relative_to(path).as_posix(), f.stat().st_size)
            for f in path.rglob("*")
            if kind.owns(f.name) and f.is_file()
        ]
        path /= kind.select(files, None).files[0].path
    beside = [Path(pin.origin.path) for pin in attached if pin.origin is not None]
    return Look(
        engine.expected_header(kind.read_header(path), spec),
        path.stat().st_size,
        str(path),
        path.name,
        attachment_bytes=sum(file.stat().st_size for file in beside),
    )


def _format(engine: Engine) -> ModelFormat:
    return catalog.model_format(engine.model_format)


def _choose(pin: PinRequest, files: Sequence[RepoFile]) -> Sequence[str]:
    if pin.choose is None:
        raise AssertionError(f"the files of {pin.name} in a repository are always chosen")
    return pin.choose(files)


def _chosen_set(kind: ModelFormat, files: Sequence[RepoFile]) -> FileSet:
    """The set that chosen files are."""
    (chosen,) = kind.group(files)
    return chosen


def stored(spec: Spec, lock: Lock, store: Store) -> Look | None:
    """Read the header of a model that lies in the store as it was published; None = it is not."""
    outputs = Outputs(store)
    engine = catalog.engine(spec.engine_kind)
    kind = _format(engine)
    paths: dict[str, Path] = {}
    for name, (derivation, file) in engine.published(spec, lock).items():
        known = outputs.of(derivation)
        if known.object is not None and known.here:
            paths[name] = store.object_path(known.object) / file
    path = paths.pop(MODEL, None)
    if path is None:
        return None
    whole = [file for file in path.parent.iterdir() if kind.owns(file.name)]
    return Look(
        engine.expected_header(kind.read_header(path), spec),
        sum(file.stat().st_size for file in (whole if len(lock.of(MODEL)) > 1 else [path])),
        str(path.parent),
        path.name,
        attachment_bytes=sum(file.stat().st_size for file in paths.values()),
    )


def wanted_of(
    spec: Spec,
    header: ModelHeader,
    *,
    attachment_bytes: int = 0,
    overruled: Mapping[str, str] | None = None,
) -> Wanted:
    """What shall be placed, from a deployment file and its model's header."""
    memory = catalog.engine(spec.engine_kind).memory
    built = memory.build_case(spec.engine)
    case = replace(
        memory.case(header, spec.serve),
        engine_version=built.engine_version,
        built_for=built.built_for,
    )
    return Wanted(
        memory,
        header,
        spec.serve,
        case,
        build=spec.engine,
        attachment_bytes=attachment_bytes,
        devices=spec.devices,
        overruled={**spec.activation.overrule, **(overruled or {})},
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known before the download of a deployment's model."""

    messages: tuple[str, ...]
    """Sentences for the build's log."""
    answer: list[dict[str, Json]]
    """Rows as `answer_as_json`."""


def before_download(
    spec: Spec,
    lock: Lock,
    host: HostView,
    hub: Hub | None = None,
    *,
    overruled: Mapping[str, str] | None = None,
) -> Forecast | None:
    """Judge a locked deployment before its model is fetched. Blocking; a few megabytes.

    Reads the headers of the locked files at their commit. None when the model comes from where a
    header cannot be read alone (a package, an address). Raises `DoesNotFit` when a rule refuses,
    or when a GPU's whole memory is less than its share; being short only of what is free now is
    no refusal, since deployments come and go.
    """
    from mmadmin.host.hub import Hub

    header = _locked_header(spec, lock, hub or Hub.from_env())
    if header is None:
        return None
    pins = catalog.engine(spec.engine_kind).pins(spec)
    attached = {pin.name for pin in pins if pin.part == MODEL and pin.name != MODEL}
    size = sum(file.size for name in attached for file in lock.of(name))
    wanted = wanted_of(spec, header, attachment_bytes=size, overruled=overruled)
    answer = place(wanted, [host])
    rows = answer_as_json(answer)
    messages = [str(row["words"]) for row in rows]
    for refusal in answer.refusals:
        _refuse_for_good(refusal, host.facts)
        if refusal.remedy:
            messages.append(f"what would fit: {refusal.remedy}")
    for candidate in answer.candidates:
        messages += [f"warning: {one.message} ({one.remedy})" for one in candidate.warnings]
    return Forecast(tuple(messages), rows)


def check_engine(spec: Spec, facts: HostFacts) -> None:
    """Raise `DoesNotFit` when rules refuse the engine on every kind of the host's GPUs.

    It needs no header, so that it comes before a download and before hours of compiling.
    """
    memory = catalog.engine(spec.engine_kind).memory
    on_gpus = memory.uses_gpus(spec.serve, spec.engine, facts)
    kinds = {gpu.architecture: gpu for gpu in facts.gpus} if on_gpus else {}
    case = memory.build_case(spec.engine)
    verdicts = [judge(with_host(case, facts, [gpu])) for gpu in kinds.values()]
    if verdicts and all(verdict.refusals for verdict in verdicts):
        first = verdicts[0].refusals[0]
        raise DoesNotFit(first.message, remedy=first.remedy, rules=[first.rule])


def _refuse_for_good(refusal: Refusal, facts: HostFacts) -> None:
    ruled = [finding for finding in refusal.findings if finding.severity == "refuse"]
    total = sum(gpu.memory_total_bytes for gpu in facts.gpus)
    if refusal.estimate is not None and not facts.gpus:
        total, needs = facts.memory_total_bytes, refusal.estimate.resident_bytes
    else:
        needs = sum(refusal.estimate.per_device) if refusal.estimate else 0
    if ruled or refusal.estimate is None or needs > total:
        raise DoesNotFit(
            f"{refusal.host}: {refusal.reason}",
            remedy=refusal.remedy,
            rules=[finding.rule for finding in ruled],
        )


def _locked_header(spec: Spec, lock: Lock, hub: Hub) -> ModelHeader | None:
    from mmadmin.host.hub_browser import read_header

    engine = catalog.engine(spec.engine_kind)
    kind = _format(engine)
    sources = [file.source for file in lock.of(MODEL)]
    if all(isinstance(source, PathSource) for source in sources):
        first = cast("PathSource", sources[0])
        return cast("ModelHeader", engine.expected_header(kind.read_header(Path(first.path)), spec))
    if not all(isinstance(source, HubSource) for source in sources):
        return None
    hubs = [cast("HubSource", source) for source in sources]
    files = [
        RepoFile(source.path, file.size, file.sha256)
        for source, file in zip(hubs, lock.of(MODEL), strict=True)
    ]
    glimpse = read_header(hub, hubs[0].repo, hubs[0].revision, _chosen_set(kind, files))
    return cast("ModelHeader", engine.expected_header(glimpse.header, spec))


def offers(
    hub: Hub,
    repo: str,
    revision: str,
    hosts: Sequence[HostView],
    serve: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """A repository's sets and whether each fits on each host, for the page of a new deployment.

    One header is read of each format; its other sets have the same layers, and their weights are
    scaled by the size of their files (`exact` says which). `best` is the largest that fits without
    stopping anything. Blocking; a few megabytes.
    """
    from mmadmin.host.hub_browser import browse

    listing = browse(hub, repo, revision)
    models = [one for one in listing.sets if one.kind == MODEL and not one.missing]
    data = listing.as_json()
    notes = list(cast("list[str]", data["notes"]))
    made: list[dict[str, Json]] = []
    best: list[str] = []
    architecture = ""
    for kind in catalog.formats().values():
        of_format = [one for one in models if catalog.format_of_set(one) is kind]
        engine = next((e for e in catalog.engines().values() if e.model_format == kind.kind), None)
        if not of_format or engine is None:
            notes += [f"{one.name}: no engine here loads a {kind.kind}" for one in of_format]
            continue
        read, header, problems = _first_readable(hub, listing, of_format)
        notes += problems
        if read is None or header is None:
            continue
        architecture = architecture or header.architecture
        options = engine.read_options(serve or engine.first_options(header))
        for one in of_format:
            expected = header if one is read else kind.scaled(header, one, read)
            offer = _offer(one, expected, hosts, engine, options)
            fit = cast("list[dict[str, Json]]", offer["fit"])
            best += [one.label] if any(row["ok"] and not row["stop"] for row in fit) else []
            attached = kind.attachment(listing.files, one)
            made.append({**offer, "exact": one is read, "projector": attached})
    return {
        **data,
        "notes": cast("Json", notes),
        "architecture": architecture,
        "best": best[-1] if best else None,
        "offers": cast("Json", made),
    }


def _first_readable(
    hub: Hub, listing: Listing, models: Sequence[FileSet]
) -> tuple[FileSet | None, ModelHeader | None, list[str]]:
    """The first set whose header is that of a language model; why the others are not."""
    from mmadmin.host.hub_browser import read_header

    notes: list[str] = []
    for one in models[:READ_ATTEMPTS]:
        try:
            return one, read_header(hub, listing.repo, listing.commit, one).header, notes
        except InvalidModel as error:
            notes.append(f"{one.label} cannot be judged: {error.message}")
    return None, None, notes


def _offer(
    one: FileSet,
    header: ModelHeader,
    hosts: Sequence[HostView],
    engine: Engine,
    options: Options,
) -> dict[str, Json]:
    memory = engine.memory
    answer = place(Wanted(memory, header, options, memory.case(header, options)), hosts)
    return {
        "engine": engine.kind,
        "quant": one.quant,
        "name": one.name,
        "files": [file.path for file in one.files],
        "size_bytes": one.size_bytes,
        "context_train": header.context_train,
        "fit": cast("Json", answer_as_json(answer)),
    }


def answer_as_json(answer: Answer) -> list[dict[str, Json]]:
    """Candidates and refusals as rows, for pages and `--json`."""
    rows: list[dict[str, Json]] = [
        {
            "host": one.host,
            "ok": True,
            "devices": list(one.devices),
            "per_device_bytes": list(one.estimate.per_device),
            "host_bytes": one.estimate.host_bytes,
            "parts": {name: one.estimate.part(name) for name in one.estimate.part_names},
            "stop": list(one.stop),
            "words": one.message,
            "warnings": [finding.as_json() for finding in one.warnings],
            "options": {},
        }
        for one in answer.candidates
    ]
    for refused in answer.refusals:
        suggested = refused.suggestions[0] if refused.suggestions else None
        rows.append(
            {
                "host": refused.host,
                "ok": False,
                "devices": [],
                "per_device_bytes": list(refused.estimate.per_device) if refused.estimate else [],
                "host_bytes": refused.estimate.host_bytes if refused.estimate else 0,
                "parts": {},
                "stop": [],
                "words": f"{refused.host}: {refused.reason}",
                "remedy": refused.remedy,
                "warnings": [finding.as_json() for finding in refused.findings],
                "options": dict(suggested.options) if suggested else {},
            }
        )
    return rows


# -- what runs


def running_view(name: str, pid: int, facts: HostFacts) -> Running:
    """What a running engine holds: GPU memory by the driver, main memory of its own pages."""
    devices = {gpu.index: held for gpu in facts.gpus if (held := gpu.held_by(pid))}
    return Running(name, devices, process_tree.own_memory_bytes(program(pid) or pid))


def running_engines(home: Home, facts: HostFacts) -> list[Running]:
    """What the engines under this installation's supervisor hold; empty when it does not run."""
    control = Supervisor(home)
    if not control.running():
        return []
    return [
        running_view(program.name, program.pid, facts)
        for program in control.status()
        if program.pid and (home.replicas / f"{program.name}.json").exists()
    ]


def wanted_of_system(system: System, spec: Spec, built_on: HostFacts | None) -> Wanted:
    """What shall be placed, from a built system, its deployment file and the host that built it."""
    attached = system.parts.keys() - {"engine", MODEL, TEMPLATE}
    size = sum(system.parts[name].stat().st_size for name in attached)
    kind = catalog.model_format(catalog.engine(system.engine_kind).model_format)
    wanted = wanted_of(spec, _header(kind, system.parts[MODEL]), attachment_bytes=size)
    cuda = version_of(built_on.cuda) if built_on else None
    return replace(
        wanted,
        options=system.options,
        case=replace(wanted.case, cuda=cuda),
        built_on=built_on,
    )


def _header(kind: ModelFormat, path: Path) -> ModelHeader:
    """The header of a model in the store; a vocabulary takes long to read, so it is kept."""
    stat = path.stat()
    return _read_header(kind.kind, path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=8)
def _read_header(kind: str, path: Path, _identity: tuple[int, ...]) -> ModelHeader:
    return catalog.model_format(kind).read_header(path)


def estimate_on(
    wanted: Wanted,
    facts: HostFacts,
    devices: Sequence[int],
    calibration: Calibration | None = None,
) -> Estimate:
    """The estimate on GPUs of this host, by index. Raises `NotFound`, `InvalidSpec`."""
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    missing = [index for index in devices if index not in by_index]
    if missing:
        raise NotFound(f"there is no GPU {missing[0]} on this host")
    known = calibration or Calibration()
    return wanted.estimate(facts, [by_index[index] for index in devices], known)


@dataclass(frozen=True, slots=True)
class Seated:
    """A running engine beside its plan."""

    wanted: Wanted
    made: Estimate
    devices: Sequence[int]
    """The GPUs of its seat, by index."""
    pid: int


def report(
    one: Seated, facts: HostFacts, log: Sequence[str], *, home: Home | None = None
) -> list[dict[str, Json]]:
    """Predicted beside measured, for the record of an activation.

    A host without GPUs is compared by the whole process tree: what of it lies in main memory.
    With `home` the installation learns from it: what the CUDA runtime takes is kept for the next
    prediction (`calibration_of`).
    """
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    seats = [by_index[index] for index in one.devices if index in by_index]
    held = {n: size for n, gpu in enumerate(seats) if (size := gpu.held_by(one.pid))}
    if home is not None and held:
        known = learn(calibration_of(home), one.made, held, [device_of(gpu) for gpu in seats])
        _keep_calibration(home, known)
    measured = one.wanted.memory.measured_buffers(log)
    rows = [*compare_devices(one.made, held), *compare_buffers(one.made, measured)]
    if not one.made.devices and (
        resident := process_tree.resident_bytes(program(one.pid) or one.pid)
    ):
        rows.insert(0, Row("main memory", one.made.host_bytes, resident))
    return [row.as_json() for row in rows]


def missing_on_gpus(one: Seated, facts: HostFacts, log: Sequence[str]) -> str:
    """Why an engine that has loaded is not on its GPUs as planned; empty = it is.

    By the engine's log, and by the driver: a GPU where less than `LEAST_SHARE` of the plan can be
    the engine's. A driver that names no processes (in a container) tells what is in use at all.
    """
    if found := one.wanted.memory.missing_layers(one.made, log):
        return found
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    for index, planned in zip(one.devices, one.made.per_device, strict=True):
        gpu = by_index.get(index)
        if gpu is None:
            return f"the driver no longer reports GPU {index}"
        unnamed = gpu.memory_total_bytes - gpu.memory_free_bytes
        unnamed -= sum(process.memory_bytes for process in gpu.processes)
        held = gpu.held_by(one.pid) + max(unnamed, 0)
        if held < planned * LEAST_SHARE:
            return f"the engine holds {held >> 20} MiB of GPU {index}, planned were {planned >> 20}"
    return ""


def calibration_of(home: Home) -> Calibration:
    """What this host has shown so far; empty at first, and when the file is damaged."""
    try:
        data = json.loads(_calibration_file(home).read_text(encoding="utf-8"))
        return Calibration({int(key): int(value) for key, value in data["context_bytes"].items()})
    except FileNotFoundError:
        return Calibration()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log_damage.warning("%s is not read: %s", _calibration_file(home), error)
        return Calibration()


def _keep_calibration(home: Home, known: Calibration) -> None:
    path = _calibration_file(home)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(
        json.dumps({"context_bytes": {str(k): v for k, v in known.context_bytes.items()}}),
        encoding="utf-8",
    )
    fresh.replace(path)


def _calibration_file(home: Home) -> Path:
    return home.root / "calibration.json"
