"""What the merge's checks cost: `python -m bench.merge [--gib 2]`.

Makes a split model of random numbers, merges it with the bare tool and with our recipe (headers of
all shards in a limited child, every key, array and tensor compared, the result hashed), each from a
warm page cache, and prints the ratio. The promise is 2.0 for files of at least 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from mmadmin.core.recipes.merge import RECIPE
from tests.support.engine import engine_store
from tests.support.tools import attempt

GIB = 1 << 30
TENSOR_BYTES = 64 << 20
ROUNDS = 3
PROMISE = 2.0


def make_split_model(folder: Path, size_bytes: int) -> Path:
    """A model of f32 tensors of 64 MiB in three shards; the first shard's path."""
    writer = GGUFWriter(folder / "big.gguf", "llama", split_max_size=size_bytes // 3 + GIB // 64)
    writer.add_block_count(1)
    block = np.random.default_rng(1).standard_normal(TENSOR_BYTES // 4, dtype=np.float32)
    for i in range(size_bytes // TENSOR_BYTES):
        writer.add_tensor(f"blk.{i}.weight", np.roll(block, i).reshape(-1, 4096))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob("big-*.gguf"))


def settle() -> None:
    """Written pages reach the disk before the next measurement."""
    os.sync()


def bare(tool: Path, first: Path, folder: Path) -> float:
    """Seconds of the tool alone, its output synced as ours is by the store's seal."""
    out = folder / "bare.gguf"
    settle()
    started = time.perf_counter()
    subprocess.run([tool, "--merge", first, out], check=True, capture_output=True)
    seconds = time.perf_counter() - started
    out.unlink()
    return seconds


def verified(engine: Path, first: Path, folder: Path) -> float:
    """Seconds of the recipe, sandbox and all."""
    work = attempt(folder / "work")
    settle()
    started = time.perf_counter()
    work.build(
        RECIPE, {"first": first.name, "output": "big.gguf"}, shards=first.parent, engine=engine
    )
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "work")
    return seconds


def measure(size_bytes: int) -> dict[str, float]:
    """Medians of alternating rounds, and their ratio."""
    engine = engine_store().path("engine")
    tool = engine / "bin" / "llama-gguf-split"
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        first = make_split_model(folder / "shards", size_bytes)
        pairs = [
            (bare(tool, first, folder), verified(engine, first, folder)) for _ in range(ROUNDS)
        ]
    bare_s, verified_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "gib": round(size_bytes / GIB, 2),
        "bare_s": round(bare_s, 2),
        "verified_s": round(verified_s, 2),
        "ratio": round(verified_s / bare_s, 2),
        "promise": PROMISE,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    print(json.dumps(measure(int(parser.parse_args().gib * GIB))))


if __name__ == "__main__":
    main()
