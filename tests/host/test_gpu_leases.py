"""Build steps and the GPUs that they hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Requirements
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import Cancelled, DoesNotFit
from mmadmin.core.fit.facts import GpuFacts, GpuProcess, host_facts_from_json
from mmadmin.core.fit.placement import Footprint, Running, fits_beside
from mmadmin.host import gpu_leases, toolbox
from mmadmin.host.facts import host_facts, lease_folder, with_leases
from mmadmin.host.gpu_leases import Granted, hold
from mmadmin.host.process import Limits
from mmadmin.host.sandbox import Sandbox
from tests.support.tools import attempt

GIB = 1 << 30
PATIENCE_S = 20


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> list[GpuFacts]:
    """Two cards of 80 GiB, the first with 30 GiB in use; a test may change the list."""
    found = [
        GpuFacts(0, "H100", "9.0", 80 * GIB, 50 * GIB, uuid="GPU-a"),
        GpuFacts(1, "H100", "9.0", 80 * GIB, 79 * GIB, uuid="GPU-b"),
    ]
    monkeypatch.setattr(
        gpu_leases, "driver_and_gpus", lambda folder: ("580.65", tuple(with_leases(found, folder)))
    )
    monkeypatch.setattr(gpu_leases, "POLL_S", 0.02)
    return found


def held(
    stack: ExitStack,
    store: Path,
    gib: int,
    owner: str = "a step",
    starting: tuple[Running, ...] = (),
) -> Granted:
    """So much of one GPU, until the stack is closed; a wait is a failure."""

    def no_wait(missing: str) -> None:
        raise AssertionError(missing)

    wanted = Requirements(gpus=1, gpu_memory_bytes=gib * GIB)
    context = hold(store, wanted, owner, starting=lambda: starting, check=silent, on_wait=no_wait)
    return stack.enter_context(context)


def indices(granted: Granted) -> list[int]:
    """The GPUs by index."""
    return [gpu.index for gpu in granted.gpus]


def test_the_emptiest_gpu_is_given_and_not_twice(tmp_path: Path, cards: list[GpuFacts]) -> None:
    """What is given but not taken yet is not free for the next; what has ended is."""
    with ExitStack() as stack:
        assert indices(held(stack, tmp_path, 60)) == [1]
        assert indices(held(stack, tmp_path, 20)) == [0]
        seen = with_leases(cards, lease_folder(tmp_path))
        assert [gpu.available_bytes for gpu in seen] == [30 * GIB, 19 * GIB]
        taken = replace(seen[1], processes=(GpuProcess(7, 45 * GIB, (os.getpid(),)),))
        assert taken.available_bytes == (79 - 15) * GIB
    assert not list(lease_folder(tmp_path).glob("*.json"))
    with ExitStack() as stack:
        assert indices(held(stack, tmp_path, 60)) == [1]


def test_an_engine_that_still_loads_keeps_its_gpu(tmp_path: Path) -> None:
    """Its memory is promised, though the driver calls it free."""
    with ExitStack() as stack:
        engine = Running("chat", {1: 60 * GIB})
        assert indices(held(stack, tmp_path, 40, starting=(engine,))) == [0]


def test_what_is_missing_is_said_until_it_is_there(tmp_path: Path, cards: list[GpuFacts]) -> None:
    """The wait names the GPU and its holders, and ends when one of them does."""
    cards[0] = replace(cards[0], processes=(GpuProcess(2**22 + 5, 30 * GIB),))
    said: list[str] = []
    first = ExitStack()
    held(first, tmp_path, 60, "quantize m (build 3)")

    def on_wait(missing: str) -> None:
        said.append(missing)
        first.close()

    wanted = Requirements(gpus=1, gpu_memory_bytes=70 * GIB)
    with hold(tmp_path, wanted, "b", starting=list, check=silent, on_wait=on_wait) as granted:
        assert indices(granted) == [1]
    assert said[0] == f"70.0 GiB of GPU 0; pid {2**22 + 5} holds 30.0 GiB"
    both = Requirements(gpus=2, gpu_memory_bytes=40 * GIB)
    with ExitStack() as stack:
        held(stack, tmp_path, 60, "quantize m (build 3)")
        said.clear()
        with pytest.raises(Cancelled):
            _cancelled_after_a_wait(tmp_path, both, said)
    assert said[-1] == "40.0 GiB of GPU 1; quantize m (build 3) holds 60.0 GiB"


def _cancelled_after_a_wait(store: Path, wanted: Requirements, said: list[str]) -> None:
    def check() -> None:
        if len(said) > 2:
            raise Cancelled("cancelled")

    with hold(store, wanted, "b", starting=list, check=check, on_wait=said.append):
        raise AssertionError("it was given what is not free")


def test_what_the_host_never_has_is_refused(tmp_path: Path) -> None:
    """No wait for a third GPU, a larger one, or more main memory than there is."""
    for wanted in (
        Requirements(gpus=3),
        Requirements(gpus=1, gpu_memory_bytes=81 * GIB),
        Requirements(memory_bytes=1 << 50),
    ):
        with (
            pytest.raises(DoesNotFit),
            hold(tmp_path, wanted, "b", starting=list, check=silent, on_wait=silent),
        ):
            pass


def test_a_killed_holder_holds_nothing(tmp_path: Path, cards: list[GpuFacts]) -> None:
    """Its lease ends with its last process, whatever file it left."""
    script = (
        "import os, sys, time; from pathlib import Path; from mmadmin.host import gpu_leases\n"
        "from mmadmin.core.build.recipe import Requirements\n"
        "from mmadmin.core.fit.facts import GpuFacts\n"
        "gpu_leases.driver_and_gpus = lambda f: ('', (GpuFacts(1, 'H', '9.0', 80<<30, 79<<30),))\n"
        "w = Requirements(gpus=1, gpu_memory_bytes=60<<30)\n"
        "with gpu_leases.hold(Path(sys.argv[1]), w, 'x', starting=list, check=lambda: None,\n"
        "                     on_wait=print):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert with_leases(cards, lease_folder(tmp_path))[1].available_bytes == 19 * GIB
        holder.send_signal(signal.SIGKILL)
    assert with_leases(cards, lease_folder(tmp_path))[1].available_bytes == 79 * GIB
    assert not list(lease_folder(tmp_path).glob("*.json"))


def test_an_activation_sees_what_a_step_holds(tmp_path: Path, cards: list[GpuFacts]) -> None:
    """It is refused naming the step; the record of the host keeps the lease."""
    with ExitStack() as stack:
        held(stack, tmp_path, 60, "quantize m (build 3)")
        gpus = tuple(with_leases(cards, lease_folder(tmp_path)))
        facts = replace(host_facts(), gpus=gpus, memory_available_bytes=64 * GIB)
        refused = fits_beside(Footprint((1,), (40 * GIB,), 0, 0, 0), facts)
        assert refused.mode == "refuse"
        assert "quantize m (build 3) holds 60.0 GiB" in refused.message
        assert host_facts_from_json(facts.as_json()) == facts


def test_a_step_s_programs_see_its_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment and device files; time and silence as the recipe says, unless the host does."""
    monkeypatch.setattr(toolbox, "gpu_nodes", lambda indices: [tmp_path / f"n{indices[0]}"])
    one = attempt(tmp_path / "a", sandbox="none")
    wanted = Requirements(gpus=1, gpu_memory_bytes=60 * GIB, time_s=5, silence_s=0)
    with one.tools.holding(wanted, "a step", silent):
        one.tools.run(["/bin/sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES"])
        assert (one.tools._limits.time_s, one.tools._limits.silence_s) == (5, 0)
    assert "sees GPU-b" in one.lines
    bound = Sandbox("bubblewrap", devices=[tmp_path / "n1"])._bubblewrap(Path("/"))
    assert bound[bound.index("--dev-bind") + 1] == str(tmp_path / "n1")
    fixed = attempt(
        tmp_path / "b", sandbox="none", limits=Limits(time_s=9), set_here=frozenset({"time_s"})
    )
    with fixed.tools.holding(wanted, "a step", silent):
        assert (fixed.tools._limits.time_s, fixed.tools._limits.silence_s) == (9, 0)
