"""A build step that takes GPU memory beside a running installation.

`python -m bench.gpu_step --gib 40`, with `MM_HOME` set to that of the installation. The step
allocates memory of one GPU inside the sandbox and keeps it for `--seconds`; it prints what it
waits for, and what it was given. While it runs, `mm fit` and activations of the installation
count that memory as taken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core import catalog
from mmadmin.core.build.builder import realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import FixedFile, Params, Recipe, Requirements, Toolbox
from mmadmin.core.errors import MmError
from mmadmin.core.home import Home
from mmadmin.core.store import Staging, Store, StoreObject
from mmadmin.host.toolbox import HostConfig, HostToolbox

PROGRAM = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        sys.exit(f"{name}: error {code}")
device, context = ctypes.c_int(), ctypes.c_void_p()
memory, count = ctypes.c_uint64(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
size = int(sys.argv[1])
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
call("cuMemsetD8_v2", memory, ctypes.c_ubyte(1), ctypes.c_size_t(size))
nodes = sorted(n for n in os.listdir("/dev") if n.startswith("nvidia"))
print(f"holds {size >> 20} MiB; {count.value} GPUs visible, /dev: {' '.join(nodes)}", flush=True)
time.sleep(int(sys.argv[2]))
"""
OVERHEAD_BYTES = 1 << 30
"""What a CUDA context takes besides the memory that is asked for."""


class GpuStep:
    """Takes memory of one GPU for a while; its output says how much."""

    kind = "bench-gpu-step"
    version = 1
    determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Any size goes."""

    def fixed_output(self, params: Params) -> Sequence[FixedFile] | None:  # noqa: ARG002
        """Made, not pinned."""
        return None

    def requires(self, params: Params) -> Requirements:
        """One GPU with that much memory."""
        size = int(str(params["bytes"])) + OVERHEAD_BYTES
        return Requirements(gpus=1, gpu_memory_bytes=size, time_s=3600, silence_s=3600)

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:  # noqa: ARG002
        """Allocate, wait, write a line."""
        size, seconds = str(params["bytes"]), str(params["seconds"])
        tools.run(["/usr/bin/env", "python3", "-c", PROGRAM, size, seconds])
        (out / "held").write_text(f"{size}\n", encoding="utf-8")


class Printing:
    """Prints what becomes of the step."""

    def __init__(self) -> None:
        self.begin, self.waits_for = time.monotonic(), ""

    def say(self, line: str) -> None:
        """A line with the seconds since the start."""
        print(f"{time.monotonic() - self.begin:7.1f} s  {line}", flush=True)

    def step_started(self, derivation: Derivation, why: str) -> None:  # noqa: ARG002
        """It begins, or goes on."""
        self.say(f"{derivation.label}: begins")

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """It waits."""
        if holder != self.waits_for:
            self.waits_for = holder
            self.say(f"{derivation.label}: waits for {holder}")

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """It was here."""
        self.say(f"{derivation.label}: {found.name} is here")

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:  # noqa: ARG002
        """It is done."""
        self.say(f"{derivation.label}: done in {seconds:.1f} s")

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """It failed."""
        self.say(f"{derivation.label}: failed: {error}")


def recipe_of(kind: str) -> Recipe:
    """The catalog's recipes and this one."""
    return GpuStep() if kind == GpuStep.kind else catalog.recipe(kind)  # type: ignore[return-value]


def main(args: Sequence[str]) -> int | str:
    """Build the step in the installation's store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=int, required=True, help="GiB of one GPU")
    parser.add_argument("--seconds", type=int, default=30)
    chosen = parser.parse_args(args)
    home, seen = Home.from_env(), Printing()
    home.store.mkdir(parents=True, exist_ok=True)

    def tools_for(_derivation: Derivation, staging: Staging, _log: Path) -> HostToolbox:
        config = HostConfig.from_env(home.store / "downloads", hidden=[home.secrets])
        return HostToolbox(staging, seen.say, lambda *_: None, lambda: False, config=config)

    params = {"bytes": chosen.gib << 30, "seconds": chosen.seconds, "at": int(time.time())}
    step = Derivation(f"hold-{chosen.gib}-gib", GpuStep.kind, GpuStep.version, params, {})
    try:
        realise(
            step, Store(home.store), tools_for, seen, recipe_of=recipe_of, owner="bench.gpu_step"
        )
    except MmError as error:
        return f"{error}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
