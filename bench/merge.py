"""What the merge's checks cost: `python -m bench.merge [--gib 2]`.

A split model of random numbers is fetched into a store and merged, in turn, by the bare tool and by
a build of the merge step as a deployment's build does it: lease, locks, promise of room, headers of
all shards in a limited child, the tool in its sandbox, every key, array and tensor compared, the
result hashed. Both write to the same file system, from a warm page cache, and neither flushes; what
flushing adds to each is told beside it. The ratio is of medians; the promise is 2.0 for files of at
least 2 GiB. It needs two cores with nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.store import Store
from mmadmin.core.store.ingest import hash_file
from tests.support.engine import engine_store, toolbox_for

GIB = 1 << 30
TENSOR_BYTES = 64 << 20
SHARDS = 3
ROUNDS = 7
PROMISE = 2.0
FILLED = 16 * GIB
STEP = 64 << 20
PATIENCE = 16
"""Steps that may leave as much memory unused as there was: others give theirs back meanwhile."""


def make_split_model(folder: Path, size_bytes: int) -> list[Path]:
    """A model of f32 tensors of 64 MiB in shards; their paths in order."""
    count = size_bytes // TENSOR_BYTES
    writer = GGUFWriter(folder / "big.gguf", "llama", split_max_tensors=-(-count // SHARDS))
    writer.add_block_count(1)
    block = np.random.default_rng(1).standard_normal(TENSOR_BYTES // 4, dtype=np.float32)
    for i in range(count):
        writer.add_tensor(f"blk.{i}.weight", np.roll(block, i).reshape(-1, 4096))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("big-*.gguf"))


def free_bytes() -> int:
    """Memory that nothing uses, not even as cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemFree:")).split()[1]) * 1024


class Settled:
    """Makes every merge begin alike: nothing to be written, shards cached, no memory unused.

    Unused memory is filled with cached pages (of a file of holes) as on any host that has run for a
    while. A virtual machine may give unused memory back to its host, where getting it again costs
    more than the whole merge, and which side had to do so would decide the ratio.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "holes"
        with self._file.open("wb") as file:
            file.truncate(FILLED * 4)
        self._at = 0

    def settle(self, warm: Path) -> None:
        """Write out, fill, and read the files of the folder `warm` into the cache."""
        os.sync()
        buffer = bytearray(STEP)
        lowest, patience = free_bytes(), PATIENCE
        with self._file.open("rb", buffering=0) as file:
            for _ in range(FILLED // STEP):
                file.seek(self._at)
                file.readinto(buffer)
                self._at = (self._at + STEP) % (FILLED * 4)
                patience = PATIENCE if free_bytes() < lowest else patience - 1
                lowest = min(lowest, free_bytes())
                if patience == 0:
                    break  # cached pages make room for cached pages
        for path in warm.iterdir():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


@dataclass(frozen=True)
class Times:
    """Seconds of one merge, without and with the file's flush to the disk."""

    s: float
    flushed_s: float


@dataclass
class Workplace:
    """A store with the tools and the shards in it, and room beside it."""

    folder: Path
    size_bytes: int
    merges: int = 0

    def __post_init__(self) -> None:
        self.store = Store(self.folder / "store", after=self._after)
        self._hashed_at = 0.0
        cache = engine_store()
        cache.seed(self.store, "tools")
        source = self.folder / "source"
        source.mkdir()
        paths = make_split_model(source, self.size_bytes)
        self.first = paths[0].name
        files: list[Json] = []
        for path in paths:
            sha256, size = hash_file(path)
            where: Json = {"kind": "path", "path": str(path)}
            files.append(
                {
                    "path": path.name,
                    "sha256": sha256,
                    "size": size,
                    "executable": False,
                    "source": where,
                }
            )
        shards = Derivation("shards", "fetch", 1, {"files": files}, {})
        self.inputs = {"shards": shards, "engine": cache.steps["tools"]}
        name = realise(shards, self.store, toolbox_for(self.store), UNOBSERVED).object
        self.shards = self.store.object_path(name)
        self.tool = cache.path("tools") / "bin" / "llama-gguf-split"
        for path in paths:
            path.unlink()
        self.settled = Settled(self.folder)

    def _after(self, step: str) -> None:
        if step == "hashed":  # the recipe is done, its digest known: what follows is the commit
            self._hashed_at = time.perf_counter()

    def bare(self) -> Times:
        """The tool alone."""
        out = self.folder / "bare.gguf"
        self.settled.settle(self.shards)
        begin = time.perf_counter()
        argv = [self.tool, "--merge", self.shards / self.first, out]
        subprocess.run(argv, check=True, capture_output=True)
        done = time.perf_counter()
        with out.open("rb") as file:
            os.fsync(file.fileno())
        flushed = time.perf_counter()
        out.unlink()
        return Times(done - begin, flushed - begin)

    def verified(self) -> Times:
        """The merge step's build; each under another name, so that none is found done."""
        self.merges += 1
        params: dict[str, Json] = {"first": self.first, "output": f"big{self.merges}.gguf"}
        merge = Derivation("big", "merge", 1, params, self.inputs)
        tools = toolbox_for(self.store)
        self.settled.settle(self.shards)
        begin = time.perf_counter()
        realise(merge, self.store, tools, UNOBSERVED)
        return Times(self._hashed_at - begin, time.perf_counter() - begin)


@dataclass(frozen=True)
class Found:
    """Medians, in seconds."""

    gib: float
    bare_s: float
    verified_s: float
    bare_flushed_s: float
    built_s: float
    """The verified merge as an object in the store."""

    @property
    def ratio(self) -> float:
        """What the checks cost."""
        return self.verified_s / self.bare_s


def measure(size_bytes: int, folder: Path, *, rounds: int = ROUNDS) -> Found:
    """Rounds of both, the first to go changing every time."""
    place = Workplace(folder, size_bytes)
    bare: list[Times] = []
    verified: list[Times] = []
    for turn in range(rounds):
        if turn % 2:
            verified.append(place.verified())
            bare.append(place.bare())
        else:
            bare.append(place.bare())
            verified.append(place.verified())
    return Found(
        size_bytes / GIB,
        statistics.median(one.s for one in bare),
        statistics.median(one.s for one in verified),
        statistics.median(one.flushed_s for one in bare),
        statistics.median(one.flushed_s for one in verified),
    )


def main() -> int:
    """Measure, print a table, and end with one line."""
    parser = argparse.ArgumentParser(prog="bench.merge", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix=".bench-", dir=options.folder, ignore_cleanup_errors=True
    ) as folder:
        found = measure(int(options.gib * GIB), Path(folder), rounds=options.rounds)
    for name, value in asdict(found).items():
        print(f"{name:16} {value:8.2f}")
    held = found.ratio <= PROMISE
    word = "ok" if held else "MISS"
    print(f"bench-merge: verified ÷ bare = {found.ratio:.2f}, limit {PROMISE}: {word}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
