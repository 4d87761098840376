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
from typing import cast

import psutil

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import HubSource, Json, PathSource
from mmadmin.core.engines.llama_server.memory import Calibration, Prediction, predict
from mmadmin.core.engines.llama_server.memory_report import (
    Row,
    compare_buffers,
    compare_devices,
    learn,
)
from mmadmin.core.engines.llama_server.run_shape import device_of
from mmadmin.core.engines.protocol import Needs, Options, System
from mmadmin.core.errors import DoesNotFit, InvalidModel, InvalidSpec, NotFound
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.placement import (
    Answer,
    Beside,
    HostView,
    Refusal,
    Running,
    Wanted,
    case_of,
    fits_beside,
    place,
    resident_bytes,
)
from mmadmin.core.fit.rules import version_of
from mmadmin.core.formats.gguf.header import TENSOR_TYPES, read_header
from mmadmin.core.formats.gguf.sets import GgufSet, RepoFile, group, select, sibling
from mmadmin.core.formats.gguf.shape import ModelShape, shape_of_headers
from mmadmin.core.home import Home
from mmadmin.core.spec.assemble import fetched_model, fetched_projector
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec
from mmadmin.core.store import Store
from mmadmin.host.hub import Hub
from mmadmin.host.hub_browser import Listing, browse, read_shape
from mmadmin.host.supervisor import Supervisor

DEFAULT_CONTEXT = 32768
"""Tokens a request, where nobody has said what is wanted."""
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
        if len(lock.model) > 1
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
    run = spec.serve.run_shape(projector_bytes)
    version = version_of(spec.engine.package.partition("==")[2])
    case = case_of(spec.engine.kind, shape, run, engine_version=version)
    return Wanted(shape, run, case, {**spec.activation.overrule, **(overruled or {})})


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known before the download of a deployment's model."""

    words: tuple[str, ...]
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
    shape = _locked_shape(spec, lock, hub or Hub.from_env())
    if shape is None:
        return None
    projector = sum(file.size for file in lock.mmproj)
    wanted = wanted_of(spec, shape, projector_bytes=projector, overruled=overruled)
    answer = place(wanted, [host])
    rows = answer_as_json(answer)
    words = [str(row["words"]) for row in rows]
    for refusal in answer.refusals:
        _refuse_for_good(refusal, host.facts)
        if refusal.remedy:
            words.append(f"what would fit: {refusal.remedy}")
    for candidate in answer.candidates:
        words += [f"warning: {finding.words} ({finding.remedy})" for finding in candidate.warnings]
    return Forecast(tuple(words), rows)


def _refuse_for_good(refusal: Refusal, facts: HostFacts) -> None:
    ruled = [finding for finding in refusal.findings if finding.severity == "refuse"]
    total = sum(gpu.memory_total_bytes for gpu in facts.gpus)
    if refusal.prediction is not None and not facts.gpus:
        total, needs = facts.memory_total_bytes, resident_bytes(refusal.prediction)
    else:
        needs = sum(refusal.prediction.per_device) if refusal.prediction else 0
    if ruled or refusal.prediction is None or needs > total:
        raise DoesNotFit(
            f"{refusal.host}: {refusal.reason}",
            remedy=refusal.remedy,
            rules=[finding.rule for finding in ruled],
        )


def _locked_shape(spec: Spec, lock: Lock, hub: Hub) -> ModelShape | None:
    sources = [file.source for file in lock.model]
    if all(isinstance(source, PathSource) for source in sources):
        first = cast("PathSource", sources[0])
        return _requantized(shape_of_model(Path(first.path)), spec.model.quantize)
    if not all(isinstance(source, HubSource) for source in sources):
        return None
    first_hub = cast("HubSource", sources[0])
    files = [
        RepoFile(cast("HubSource", file.source).path, file.size, file.sha256) for file in lock.model
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
    run = options.run_shape()
    answer = place(Wanted(scaled, run, case_of("llama-server", scaled, run)), hosts)
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
            "per_device_bytes": list(one.prediction.per_device),
            "host_bytes": one.prediction.host_bytes,
            "parts": {name: one.prediction.part(name) for name in _part_names(one.prediction)},
            "stop": list(one.stop),
            "words": one.words,
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
                "per_device_bytes": list(refused.prediction.per_device)
                if refused.prediction
                else [],
                "host_bytes": refused.prediction.host_bytes if refused.prediction else 0,
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
    devices = {
        gpu.index: held
        for gpu in facts.gpus
        if (held := sum(p.memory_bytes for p in gpu.processes if p.pid == pid))
    }
    try:
        memory = psutil.Process(pid).memory_info()
        own = max(int(memory.rss) - int(memory.shared), 0)
    except psutil.NoSuchProcess:
        own = 0
    return Running(name, devices, own)


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


def predict_system(
    system: System,
    facts: HostFacts,
    devices: Sequence[int],
    calibration: Calibration | None = None,
) -> Prediction:
    """The prediction for a built system on GPUs of this host, by index."""
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    missing = [index for index in devices if index not in by_index]
    if missing:
        raise NotFound(f"there is no GPU {missing[0]} on this host")
    projector = system.mmproj.stat().st_size if system.mmproj else 0
    return predict(
        shape_of_model(system.model),
        system.options.run_shape(projector),
        [device_of(by_index[index]) for index in devices],
        calibration=calibration,
        cpu_features=facts.cpu_features,
    )


def beside(
    system: System,
    facts: HostFacts,
    devices: Sequence[int],
    leaving: Running | None,
    calibration: Calibration | None = None,
) -> tuple[Beside, Needs]:
    """Whether a built system can start now, beside or instead of what runs; and what it needs."""
    made = predict_system(system, facts, devices, calibration)
    needs = made.as_needs()
    return fits_beside(needs, devices, facts, leaving, resident=resident_bytes(made)), needs


def report(
    prediction: Prediction,
    facts: HostFacts,
    devices: Sequence[int],
    pid: int,
    log: Sequence[str],
    *,
    home: Home | None = None,
) -> list[dict[str, Json]]:
    """Predicted beside measured, for the record of an activation.

    A host without GPUs is compared by the whole process: what of it lies in main memory.
    With `home` the installation learns from it: what the CUDA runtime takes is kept for the next
    prediction (`calibration_of`).
    """
    held = {
        position: size
        for position, index in enumerate(devices)
        for gpu in facts.gpus
        if gpu.index == index
        and (size := sum(p.memory_bytes for p in gpu.processes if p.pid == pid))
    }
    if home is not None and held:
        by_index = {gpu.index: gpu for gpu in facts.gpus}
        seats = [device_of(by_index[index]) for index in devices]
        _keep_calibration(home, learn(calibration_of(home), prediction, held, seats))
    rows = [*compare_devices(prediction, held), *compare_buffers(prediction, log)]
    if not prediction.devices and (resident := _resident(pid)):
        rows.insert(0, Row("main memory", prediction.host_bytes, resident))
    return [row.as_json() for row in rows]


def _resident(pid: int) -> int:
    """Bytes of a process that lie in main memory; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


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


def _part_names(prediction: Prediction) -> list[str]:
    return sorted({name for parts in (*prediction.devices, prediction.host) for name in parts})
