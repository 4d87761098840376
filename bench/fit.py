"""Predicted memory beside what the pinned llama-server says on this CPU: `make bench-fit`.

Seven small models are made with random weights, served one after another by the engine of the test
cache, and each buffer that the engine logs is compared with the prediction. Ends with 1 when one
is off by more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fit_models import RECIPES, Recipe, write
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.engine import ENGINE
from mmadmin.core.engines.llama_server.memory_model import MEMORY
from mmadmin.core.engines.protocol import Seat, System
from mmadmin.core.fit.estimate import Row, compare_buffers
from mmadmin.core.formats.gguf.header import read_header
from mmadmin.core.formats.gguf.shape import shape_of_headers
from mmadmin.host.facts import host_facts
from tests.support.engine import EngineStore, engine_store

LIMIT_PERMILLE = 30
LOAD_TIMEOUT_S = 600
LISTENING = "listening on unix:"
VERBOSE: dict[str, Json] = {"verbosity": 4}
"""Below 4 the engine does not say its buffer sizes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models, or those that are named."""
    parser = argparse.ArgumentParser(prog="bench.fit", description=__doc__)
    parser.add_argument("names", nargs="*", help="models to measure; all by default")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    chosen = parser.parse_args(arguments)
    engine = engine_store()
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="mm-fit-") as folder:
        for recipe in RECIPES:
            if not chosen.names or recipe.name in chosen.names:
                rows[recipe.name] = measure(recipe, engine, Path(folder))
    if chosen.json:
        print(json.dumps({name: [r.as_json() for r in found] for name, found in rows.items()}))
    else:
        show(rows)
    worst = max(abs(row.error_permille) for found in rows.values() for row in found)
    return 0 if worst <= LIMIT_PERMILLE else 1


def measure(recipe: Recipe, engine: EngineStore, folder: Path) -> list[Row]:
    """Make a model, predict, serve it once, compare. The file is removed."""
    model = folder / f"{recipe.name}.gguf"
    write(recipe, engine.path("engine-source") / "models" / recipe.vocabulary, model)
    made = MEMORY.estimate(
        shape_of_headers([read_header(model)]),
        ENGINE.read_options(recipe.serve),
        cpu_features=host_facts().cpu_features,
    )
    system = System(
        parts={"engine": engine.path("engine"), "model": model},
        options=ENGINE.read_options({**recipe.serve, "flags": VERBOSE}),
        engine_kind="llama-server",
        alias=recipe.name,
    )
    socket = folder / "engine.sock"
    socket.unlink(missing_ok=True)
    launch = ENGINE.launch(system, Seat(str(socket)))
    lines = serve_once(list(launch.argv), {**launch.env, launch.secret_env: "bench"})
    model.unlink()
    found = compare_buffers(made, MEMORY.measured_buffers(lines))
    if not found:
        raise SystemExit(f"{recipe.name}: the engine named no buffers:\n" + "\n".join(lines[-20:]))
    return found


def serve_once(argv: list[str], env: dict[str, str]) -> list[str]:
    """Start the engine, wait until it listens, end it; its log lines."""
    lines: list[str] = []
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        for line in process.stdout:
            lines.append(line.rstrip())
            if LISTENING in line or time.monotonic() > deadline:
                break
        process.kill()  # a SIGTERM in the moment in which it begins to listen can be lost
    return lines


def show(rows: dict[str, list[Row]]) -> None:
    """A table for people and for docs/measurements.md."""
    print("| model | part | predicted MiB | measured MiB | error |")
    print("|---|---|---:|---:|---:|")
    for name, found in rows.items():
        for row in found:
            print(
                f"| {name} | {row.part} | {row.predicted / 2**20:.2f} | "
                f"{row.measured / 2**20:.2f} | {row.error_permille / 10:+.1f} % |"
            )


if __name__ == "__main__":
    sys.exit(main())
