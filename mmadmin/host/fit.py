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
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import HubSource, Json, PathSource
from mmadmin.core.engines.llama_server.parts import fetched_model, fetched_projector
from mmadmin.core.engines.protocol import Options, System
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
from mmadmin.core.formats.gguf.header import TENSOR_TYPES, read_header
from mmadmin.core.formats.gguf.sets import GgufSet, group, select, sibling
from mmadmin.core.formats.gguf.shape import ModelShape, shape_of_headers
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.home import Home
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec
from mmadmin.core.store import Store
from mmadmin.host import process_tree
from mmadmin.host.supervisor import Supervisor

if TYPE_CHECKING:
    from mmadmin.host.hub import Hub
    from mmadmin.host.hub_browser import Listing


DEFAULT_CONTEXT = 32768
"""Tokens a request, where nobody has said what is wanted."""
OFFERED_ENGINE = "llama-server"
"""The engine that a repository's models are offered for."""
LEAST_SHARE = 0.5
"""Of what was planned on a GPU, the part that an engine holds at least once it has loaded."""
READ_ATTEMPTS = 3
"""So many sets of a repository are tried before it is taken for one without language models."""
log_damage = logging.getLogger(__name__)
BLOCKS: Mapping[str, tuple[int, int]] = {name: (n, size) for name, n, size in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class Look:
    """A deployment's model as far as its header says."""

    shape: ModelShape
    size_bytes: int
    """Bytes to fetch."""
    where: str
    """The repository at its commit, or the file."""
    label: str
    """The quant or file that was chosen."""
    listing: Listing | None = None
    projector_bytes: int = 0
    """Size of the projector that the spec names."""


def shape_of_model(path: Path) -> ModelShape:
    """The shape of a local GGUF; any shard stands for its whole set. Raises `InvalidModel`."""
    files = [
        RepoFile(file.name, file.stat().st_size)
        for file in sorted(path.parent.glob("*.gguf"))
        if file.is_file()
    ]
    for one in group(files):
        if path.name in {file.path for file in one.files}:
            return shape_of_headers([read_header(path.parent / f.path) for f in one.files])
    return shape_of_headers([read_header(path)])


def look(spec: Spec, hub: Hub | None = None) -> Look:
    """Read the header of a spec's model, where that needs no download. Blocking.

    A hub repository is read by ranges, a path directly. Raises `InvalidSpec` for a package or an
    address, whose header cannot be seen before the download (then: `stored`), and what `browse`
    raises.
    """
    from mmadmin.host.hub import Hub
    from mmadmin.host.hub_browser import browse, read_shape

    model = spec.model
    if model.source == "path":
        path = Path(model.path)
        if path.is_dir():
            files = [
                RepoFile(f.relative_to(path).as_posix(), f.stat().st_size)
                for f in path.rglob("*.gguf")
                if f.is_file()
            ]
            path /= select(files, None).files[0].path
        shape = shape_of_model(path)
        return Look(
            _requantized(shape, model.quantize),
            path.stat().st_size,
            str(path),
            path.name,
            projector_bytes=Path(model.mmproj).stat().st_size if model.mmproj else 0,
        )
    if model.source != "hub":
        raise InvalidSpec(
            "the header of this model cannot be seen before it is downloaded",
            remedy="to have it read in the store, fetch and build it first",
            field="model.source",
            command="mm build FILE",
        )
    found = browse(hub or Hub.from_env(), model.repo, model.revision)
    files = [f for f in found.files if not model.files or f.path in model.files]
    if not files:
        raise NotFound(f"{found.repo} has none of the files that are named", field="model.files")
    chosen = select(files, model.quant or None)
    glimpse = read_shape(hub or Hub.from_env(), found.repo, found.commit, chosen)
    return Look(
        _requantized(glimpse.shape, model.quantize),
        chosen.size_bytes,
        f"{found.repo}@{found.commit[:12]}",
        chosen.label,
        found,
        next((file.size_bytes for file in found.files if file.path == model.mmproj), 0),
    )


def stored(spec: Spec, lock: Lock, store: Store) -> Look | None:
    """Read the header of a model that lies in the store as it was published; None = it is not."""
    outputs = Outputs(store)

    def path_of(part: tuple[Derivation, str] | None) -> Path | None:
        known = outputs.of(part[0]) if part else None
        if part is None or known is None or known.object is None or not known.here:
            return None
        return store.object_path(known.object) / part[1]

    path = path_of(fetched_model(spec, lock))
    if path is None:
        return None
    projector = path_of(fetched_projector(spec, lock))
    return Look(
        _requantized(shape_of_model(path), spec.model.quantize),
        sum(file.stat().st_size for file in path.parent.glob("*.gguf"))
        if len(lock.of("model")) > 1
        else path.stat().st_size,
        str(path.parent),
        path.name,
        projector_bytes=projector.stat().st_size if projector else 0,
    )


def wanted_of(
    spec: Spec,
    shape: ModelShape,
    *,
    projector_bytes: int = 0,
    overruled: Mapping[str, str] | None = None,
) -> Wanted:
    """What shall be placed, from a deployment file and its model's shape."""
    memory = catalog.engine(spec.engine_kind).memory
    built = memory.build_case(spec.engine)
    case = replace(
        memory.case(shape, spec.serve),
        engine_version=built.engine_version,
        built_for=built.built_for,
    )
    return Wanted(
        memory,
        shape,
        spec.serve,
        case,
        build=spec.engine,
        attachment_bytes=projector_bytes,
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

    shape = _locked_shape(spec, lock, hub or Hub.from_env())
    if shape is None:
        return None
    projector = sum(file.size for file in lock.of("mmproj"))
    wanted = wanted_of(spec, shape, projector_bytes=projector, overruled=overruled)
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


def _locked_shape(spec: Spec, lock: Lock, hub: Hub) -> ModelShape | None:
    from mmadmin.host.hub_browser import read_shape

    sources = [file.source for file in lock.of("model")]
    if all(isinstance(source, PathSource) for source in sources):
        first = cast("PathSource", sources[0])
        return _requantized(shape_of_model(Path(first.path)), spec.model.quantize)
    if not all(isinstance(source, HubSource) for source in sources):
        return None
    first_hub = cast("HubSource", sources[0])
    files = [
        RepoFile(cast("HubSource", file.source).path, file.size, file.sha256)
        for file in lock.of("model")
    ]
    chosen = select(files, None)
    glimpse = read_shape(hub, first_hub.repo, first_hub.revision, chosen)
    return _requantized(glimpse.shape, spec.model.quantize)


def offers(
    hub: Hub,
    repo: str,
    revision: str,
    hosts: Sequence[HostView],
    serve: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """A repository's sets and whether each fits on each host, for the page of a new deployment.

    One set's header is read; the others have the same layers, and their weights are scaled by the
    size of their files (`exact` says which). `best` is the largest that fits without stopping
    anything. Blocking; a few megabytes.
    """
    from mmadmin.host.hub_browser import browse

    listing = browse(hub, repo, revision)
    models = [one for one in listing.sets if one.kind == "model" and one.complete]
    data = listing.as_json()
    if not models:
        return {**data, "architecture": "", "best": None, "offers": []}
    read, shape, notes = _first_readable(hub, listing, models)
    if read is None or shape is None:
        known = cast("list[Json]", data["notes"])
        return {**data, "notes": [*known, *notes], "architecture": "", "best": None, "offers": []}
    wanted = serve or {"context": min(shape.context_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)}
    options = catalog.engine("llama-server").read_options(wanted)
    made = [_offer(one, read, shape, hosts, options) for one in models]
    for one, offer in zip(models, made, strict=True):
        projector = sibling(listing.files, one, "mmproj")
        offer["projector"] = projector.files[0].path if projector else None
    best = [
        one.label
        for one, offer in zip(models, made, strict=True)
        if any(row["ok"] and not row["stop"] for row in cast("list[dict[str, Json]]", offer["fit"]))
    ]
    return {
        **data,
        "architecture": shape.architecture,
        "best": best[-1] if best else None,
        "offers": cast("Json", made),
    }


def _first_readable(
    hub: Hub, listing: Listing, models: Sequence[GgufSet]
) -> tuple[GgufSet | None, ModelShape | None, list[str]]:
    """The first set whose header is that of a language model; why the others are not."""
    from mmadmin.host.hub_browser import read_shape

    notes: list[str] = []
    for one in models[:READ_ATTEMPTS]:
        try:
            return one, read_shape(hub, listing.repo, listing.commit, one).shape, notes
        except InvalidModel as error:
            notes.append(f"{one.label} cannot be judged: {error.message}")
    return None, None, notes


def _offer(
    one: GgufSet,
    read: GgufSet,
    shape: ModelShape,
    hosts: Sequence[HostView],
    options: Options,
) -> dict[str, Json]:
    scaled = shape if one is read else _scaled(shape, one, read)
    memory = catalog.engine(OFFERED_ENGINE).memory
    answer = place(Wanted(memory, scaled, options, memory.case(scaled, options)), hosts)
    return {
        "quant": one.quant,
        "name": one.name,
        "files": [file.path for file in one.files],
        "size_bytes": one.size_bytes,
        "context_train": shape.context_train,
        "exact": one is read,
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
    return Running(name, devices, process_tree.own_memory_bytes(pid))


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
    attachments = system.parts["mmproj"].stat().st_size if "mmproj" in system.parts else 0
    header = shape_of_model(system.parts["model"])
    wanted = wanted_of(spec, header, projector_bytes=attachments)
    cuda = version_of(built_on.cuda) if built_on else None
    return replace(
        wanted,
        options=system.options,
        case=replace(wanted.case, cuda=cuda),
        built_on=built_on,
    )


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
    if not one.made.devices and (resident := process_tree.resident_bytes(one.pid)):
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


# -- shapes of files that are not there yet


def _scaled(shape: ModelShape, wanted: GgufSet, read: GgufSet) -> ModelShape:
    """The same layers with weights of another quant: sizes in proportion to the files'."""
    size, known = wanted.size_bytes, read.size_bytes
    main = _main_type(wanted.quant or "")
    return replace(
        shape,
        weights=tuple(
            replace(
                w,
                size=w.size * size // known,
                offset=w.offset * size // known,
                type=main if main in BLOCKS else w.type,
            )
            if len(w.shape) > 1
            else w
            for w in shape.weights
        ),
    )


def _main_type(quant: str) -> str:
    """The type of most matrices of a quant: `Q4_K` of `UD-Q4_K_XL`."""
    bare = quant.upper().rpartition("-")[2]
    return next((name for name in (bare, bare.rpartition("_")[0]) if name in BLOCKS), bare)


def _requantized(shape: ModelShape, quant: str) -> ModelShape:
    """The weights as `llama-quantize` would make them, by the quant's main type."""
    main = _main_type(quant)
    if main not in BLOCKS:
        return shape
    block, size = BLOCKS[main]
    return replace(
        shape,
        weights=tuple(
            replace(w, type=main, size=w.elements // block * size)
            if len(w.shape) > 1 and w.shape[0] % block == 0
            else w
            for w in shape.weights
        ),
    )
