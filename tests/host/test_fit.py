"""Will it fit: asked about repositories, files and what runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmadmin.core.build.recipe import HubSource, IndexSource, Json, PathSource
from mmadmin.core.engines.llama_server.memory_model import MEMORY
from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.protocol import System
from mmadmin.core.errors import DoesNotFit, InvalidSpec, NotFound
from mmadmin.core.fit.described_host import described_host
from mmadmin.core.fit.estimate import Calibration, device_of
from mmadmin.core.fit.facts import GpuProcess, HostFacts
from mmadmin.core.fit.placement import (
    Beside,
    HostView,
    Running,
    Wanted,
    choose_seat,
    place,
    seats,
)
from mmadmin.core.formats.gguf.format import FORMAT
from mmadmin.core.formats.gguf.sets import select
from mmadmin.core.home import Home
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.spec import parse_spec
from mmadmin.host import fit as fit_module
from mmadmin.host.facts import host_facts
from mmadmin.host.fit import (
    Seated,
    answer_as_json,
    before_download,
    calibration_of,
    check_engine,
    estimate_on,
    look,
    missing_on_gpus,
    offers,
    report,
    running_engines,
    running_view,
    wanted_of,
    wanted_of_system,
)
from mmadmin.host.hub import Hub
from mmadmin.host.policy import Policy
from tests.core.formats.gguf.tables import mistral_medium
from tests.host.test_hub_browser import header
from tests.support.hub import LocalHub, local_hub

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "deployments" / "hosts"
V100S = HostView("v100x4", described_host(HOSTS, "v100x4"))
CPU = HostView("cpu", described_host(HOSTS, "cpu"))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    """A hub with the first deployment's repository, in three quants."""
    folder = tmp_path_factory.mktemp("hub")
    with local_hub() as running:
        files = {}
        for quant in ("Q4_K_M", "Q6_K", "BF16"):
            weights = list(mistral_medium(quant).weights)
            files[f"m-{quant}.gguf"] = header(
                folder / f"{quant}.gguf", weights, vocabulary=512, split=(0, 1, 0)
            )
        running.repo("unsloth/Mistral-Medium-3.5-128B-GGUF").commit(files)
        yield running


def hub_of(local: LocalHub) -> Hub:
    """The hub, without waiting."""
    return Hub(local.url, None, Policy(backoff_s=0.01, attempts=2))


def test_the_catalog_deployment_on_a_laptop(local: LocalHub) -> None:
    """The seed's file, its header from the hub, a described host: it fits the four V100s."""
    text = (ROOT / "deployments/catalog/mistral-medium-3.5-v100.toml").read_text()
    spec = parse_spec(text)
    seen = look(spec, hub_of(local))
    assert seen.label == "Q4_K_M"
    assert seen.listing is not None
    answer = place(wanted_of(spec, seen.header), [V100S, CPU])
    assert [c.host for c in answer.candidates] == ["v100x4"]
    rows = answer_as_json(answer)
    assert [row["ok"] for row in rows] == [True, False]
    assert "main memory" in str(rows[1]["words"])


def test_a_locked_deployment_is_judged_before_its_download(local: LocalHub) -> None:
    """The four V100s take it; one T4 and CUDA 13 refuse; a full card is only a word in the log."""
    spec = parse_spec(_hub_spec("Q4_K_M"))
    seen = look(spec, hub_of(local))
    assert seen.listing is not None
    chosen = select(seen.listing.files, "Q4_K_M").files[0]
    source = HubSource(seen.listing.repo, seen.listing.commit, chosen.path)
    locked = LockedFile(chosen.path, chosen.sha256 or "", chosen.size_bytes, source)
    engine = LockedFile("e.tar.gz", "0" * 64, 1, PathSource("/nonexistent/e.tar.gz"))
    lock = Lock({"model": (locked,), "engine": (engine,)})
    fine = before_download(spec, lock, V100S, hub_of(local))
    assert fine is not None
    assert fine.messages == ("v100x4: fits on GPU 0, 1, 2, 3",)
    facts = V100S.facts
    full = replace(facts, gpus=tuple(replace(gpu, memory_free_bytes=1 << 30) for gpu in facts.gpus))
    busy = before_download(spec, lock, HostView("full", full), hub_of(local))
    assert busy is not None
    assert "could have 1.0 GiB" in busy.messages[0]
    with pytest.raises(DoesNotFit) as caught:
        before_download(spec, lock, HostView("new", replace(facts, cuda="13.0")), hub_of(local))
    assert "cuda13-has-no-volta" in caught.value.details["rules"]
    t4 = HostView("t4", described_host(HOSTS, "t4"))
    with pytest.raises(DoesNotFit, match="want 4 GPUs"):
        before_download(spec, lock, t4, hub_of(local))
    bare = replace(spec, serve=read_options({"context": 65536}))
    with pytest.raises(DoesNotFit, match="GPU 0 needs"):
        before_download(bare, lock, t4, hub_of(local))
    seeing = replace(
        lock, pins={**lock.pins, "mmproj": (replace(locked, path="mmproj.gguf", size=2 << 30),)}
    )
    with_projector = replace(spec, model=replace(spec.model, mmproj="mmproj.gguf"))
    both = before_download(with_projector, seeing, V100S, hub_of(local))
    assert both is not None
    first, second = (f.answer[0]["per_device_bytes"] for f in (fine, both))
    assert second[0] - first[0] > 2 << 30  # type: ignore[index, operator]
    wheel = replace(locked, source=IndexSource("a", "1", "a.whl"))
    package = replace(lock, pins={**lock.pins, "model": (wheel,)})
    assert before_download(spec, package, V100S, hub_of(local)) is None


def test_an_engine_for_other_gpus_is_refused_before_it_is_built() -> None:
    """Without the model's header; where one kind of GPU would do, or none is used, it is not."""
    spec = parse_spec(_hub_spec("Q4_K_M"))
    for_80 = replace(spec, engine=replace(spec.engine, cuda_architectures=(80,)))
    with pytest.raises(DoesNotFit) as caught:
        check_engine(for_80, V100S.facts)
    assert caught.value.details["rules"] == ["engine-not-built-for-the-gpu"]
    a100 = described_host(HOSTS, "a100").gpus[0]
    check_engine(for_80, replace(V100S.facts, gpus=(*V100S.facts.gpus, a100)))
    check_engine(for_80, CPU.facts)
    check_engine(replace(for_80, engine=replace(for_80.engine, backend="cpu")), V100S.facts)
    with pytest.raises(DoesNotFit, match="driver 470") as caught:
        check_engine(spec, replace(V100S.facts, driver="470.82.01"))
    assert "525.60" in caught.value.remedy


def test_offers_say_what_fits_for_every_quant(local: LocalHub) -> None:
    """Q4_K_M fits four V100s, Q6_K does with the page's context, BF16 never; sizes are there."""
    found = offers(hub_of(local), "unsloth/Mistral-Medium-3.5-128B-GGUF", "main", [V100S])
    rows = {str(o["quant"]): o for o in found["offers"]}  # type: ignore[union-attr, call-overload, index]
    assert {quant: row["fit"][0]["ok"] for quant, row in rows.items()} == {
        "Q4_K_M": True,
        "Q6_K": True,
        "BF16": False,
    }
    assert found["best"] == "Q6_K"
    assert rows["Q4_K_M"]["exact"]
    assert not rows["Q6_K"]["exact"]
    exact = MEMORY.estimate(
        mistral_medium("Q6_K"),
        read_options({"context": 32768}),
        [device_of(g) for g in V100S.facts.gpus],
    )
    guessed = sum(rows["Q6_K"]["fit"][0]["per_device_bytes"])
    assert guessed == pytest.approx(sum(exact.per_device), rel=0.01)


def test_a_repository_without_models_offers_nothing(local: LocalHub) -> None:
    """No model, no header: the listing alone comes back."""
    local.repo("team/none").commit({"README.md": b"nothing"})
    assert offers(hub_of(local), "team/none", "main", [CPU])["offers"] == []


def test_files_that_are_no_language_models_are_listed_and_explained(local: LocalHub) -> None:
    """A damaged set is passed over; a repository of nothing else is listed with the reason."""
    good = local.repos["unsloth/Mistral-Medium-3.5-128B-GGUF"].find("main")
    assert good is not None
    local.repo("team/mixed").commit(
        {
            "a-Q2_K.gguf": b"GGUF" + bytes(3000),
            "b-Q4_K_M.gguf": good.files["m-Q4_K_M.gguf"],
            "mmproj-F16.gguf": b"GGUF" + bytes(4000),
        }
    )
    found = offers(hub_of(local), "team/mixed", "main", [CPU])
    assert found["offers"][0]["projector"] == "mmproj-F16.gguf"  # type: ignore[index, call-overload]
    assert found["architecture"] == "mistral3"
    local.repo("team/broken").commit({"a-Q2_K.gguf": b"GGUF" + bytes(3000)})
    broken = offers(hub_of(local), "team/broken", "main", [CPU])
    assert broken["offers"] == []
    assert "Q2_K cannot be judged" in str(broken["notes"])
    assert broken["sets"]


def test_a_package_cannot_be_looked_at_before_it_is_here(local: LocalHub, tmp_path: Path) -> None:
    """The refusal says how to get there; a path is read, and a missing quant is named."""
    spec = parse_spec((ROOT / "deployments/catalog/smollm2-135m.toml").read_text())
    with pytest.raises(InvalidSpec, match="before it is downloaded"):
        look(spec, hub_of(local))
    hollow = header(
        tmp_path / "h", list(mistral_medium("Q4_K_M").weights), vocabulary=64, split=(0, 1, 0)
    )
    model = tmp_path / "big-Q4_K_M.gguf"
    with model.open("wb") as file:
        file.write(hollow.head)
        file.truncate(hollow.size)
    here = replace(spec, model=replace(spec.model, source="path", path=str(model), quantize=""))
    assert look(here).header.weight_bytes == mistral_medium("Q4_K_M").weight_bytes
    folder = replace(here, model=replace(here.model, path=str(tmp_path), quantize="Q8_0"))
    quantized = look(folder).header
    assert quantized.weight_bytes == pytest.approx(125e9 * 8.5 / 8, rel=0.01)
    with pytest.raises(NotFound):
        look(parse_spec(_hub_spec("Q2_K")), hub_of(local))


def _hub_spec(quant: str) -> str:
    text = (ROOT / "deployments/catalog/mistral-medium-3.5-v100.toml").read_text()
    return text.replace('quant = "Q4_K_M"', f'quant = "{quant}"')


def _system(folder: Path, options: Mapping[str, Json]) -> System:
    """A system whose model has a header and no bytes on the disk."""
    model = folder / "m.gguf"
    hollow = header(
        folder / "h", list(mistral_medium("Q4_K_M").weights), vocabulary=64, split=(0, 1, 0)
    )
    with model.open("wb") as file:
        file.write(hollow.head)
        file.truncate(hollow.size)
    return System("llama-server", "m", {"engine": folder, "model": model}, read_options(options))


def _placed(folder: Path, options: Mapping[str, Json]) -> Wanted:
    """What is placed for such a system."""
    return wanted_of_system(_system(folder, options), parse_spec(_hub_spec("Q4_K_M")), None)


def _beside(wanted: Wanted, facts: HostFacts, leaving: Running | None = None) -> Beside:
    """The answer of an activation."""
    return choose_seat(seats(wanted, facts, Calibration(), leaving), facts, leaving)


def test_layers_that_are_not_on_the_gpus_are_noticed(tmp_path: Path) -> None:
    """By the engine's log, and by what the driver says that its processes can hold at most."""
    wanted = _placed(tmp_path, {"context": 65536, "gpu_layers": 99})
    facts, cards = V100S.facts, [0, 1, 2, 3]
    pid, planned = os.getpid(), estimate_on(wanted, facts, cards)
    seated = Seated(wanted, planned, cards, pid)

    def holding(size: int, owner: int) -> HostFacts:
        return replace(
            facts,
            gpus=tuple(
                replace(
                    gpu,
                    memory_free_bytes=gpu.memory_total_bytes - size,
                    processes=(GpuProcess(99, size, (owner, 1)),),
                )
                for gpu in facts.gpus
            ),
        )

    whole = max(planned.per_device)
    assert missing_on_gpus(seated, holding(whole, pid), []) == ""
    assert "GPU 0" in missing_on_gpus(seated, holding(whole, 98), [])  # another's memory
    assert "GPU 0" in missing_on_gpus(seated, holding(whole // 4, pid), [])
    unnamed = holding(whole, pid)
    unnamed = replace(unnamed, gpus=tuple(replace(gpu, processes=()) for gpu in unnamed.gpus))
    assert missing_on_gpus(seated, unnamed, []) == ""
    log = ["warning: no usable GPU found, --gpu-layers option will be ignored"]
    assert "89 layers" in missing_on_gpus(seated, unnamed, log)
    log = ["load_tensors: offloaded 12/89 layers to GPU"]
    assert "12 layers" in missing_on_gpus(seated, unnamed, log)
    log = ["load_tensors: offloaded 89/89 layers to GPU"]
    assert missing_on_gpus(seated, unnamed, log) == ""
    assert "GPU 3" in missing_on_gpus(seated, replace(unnamed, gpus=unnamed.gpus[:3]), log)


def test_a_built_system_beside_or_in_place_of_what_runs(tmp_path: Path) -> None:
    """The answer at an activation, from a file and from what a process holds on the cards."""
    options = {"context": 65536, "gpu_layers": 99, "tensor_split": ["8", "8", "8", "8"]}
    wanted = _placed(tmp_path, options)
    facts, cards = V100S.facts, [0, 1, 2, 3]
    assert _beside(wanted, facts).mode == "overlap"
    busy = replace(
        facts,
        gpus=tuple(
            replace(
                gpu,
                memory_free_bytes=6 << 30,
                processes=(GpuProcess(os.getpid(), 49 << 29), GpuProcess(1, 1 << 29)),
            )
            for gpu in facts.gpus
        ),
    )
    old = running_view("chat", os.getpid(), busy)
    assert old.devices == dict.fromkeys(cards, 49 << 29)
    assert old.host_bytes > 0
    answer = _beside(wanted, busy, old)
    assert (answer.mode, answer.devices) == ("swap", (0, 1, 2, 3))
    assert _beside(wanted, busy).mode == "refuse"
    seated = Seated(wanted, estimate_on(wanted, facts, cards), cards, os.getpid())
    rows = report(seated, busy, ["x:  CUDA0 KV buffer size =  5888.00 MiB"])
    assert [row["part"] for row in rows] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "GPU 0 cache"]
    assert rows[4]["error_permille"] == 0
    home = Home(tmp_path)
    assert calibration_of(home) == Calibration()
    report(seated, busy, [], home=home)
    learned = calibration_of(home)
    assert learned.context_bytes[70] > 0
    again = estimate_on(wanted, facts, cards, learned)
    assert min(again.per_device) == 49 << 29
    (tmp_path / "calibration.json").write_text("not json")
    assert calibration_of(home) == Calibration()
    with pytest.raises(NotFound, match="no GPU 7"):
        estimate_on(wanted, facts, [7])


def test_without_gpus_the_process_is_compared(tmp_path: Path) -> None:
    """On a CPU host what lies in main memory stands beside the prediction; a gone process not."""
    wanted = _placed(tmp_path, {"context": 4096})
    made = estimate_on(wanted, host_facts(), [])
    rows = report(Seated(wanted, made, [], os.getpid()), host_facts(), [])
    assert [row["part"] for row in rows] == ["main memory"]
    assert rows[0]["predicted"] == made.host_bytes
    assert isinstance(rows[0]["measured"], int)
    assert rows[0]["measured"] > 2**20
    assert report(Seated(wanted, made, [], 2**22 + 5), host_facts(), []) == []


def test_a_process_that_is_gone_holds_nothing() -> None:
    """Asking about a pid that ended is no error."""
    assert running_view("gone", 2**22 + 5, host_facts()).host_bytes == 0


def test_engines_under_the_supervisor_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs with a launch file are engines; services are not, and no supervisor means none."""

    class Control:
        def __init__(self, home: Home) -> None:
            self.home = home

        def running(self) -> bool:
            return True

        def status(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=n, pid=os.getpid()) for n in ("gate", "chat-1-ab")]

    home = Home(tmp_path)
    assert running_engines(home, host_facts()) == []
    home.replicas.mkdir()
    (home.replicas / "chat-1-ab.json").write_text("{}")
    monkeypatch.setattr(fit_module, "Supervisor", Control)
    assert [one.name for one in running_engines(home, host_facts())] == ["chat-1-ab"]


def test_any_shard_stands_for_its_set(tmp_path: Path) -> None:
    """A set's shape is the same whichever of its files is named."""
    weights = list(mistral_medium("Q4_K_M").weights)
    for i, part in enumerate([weights[:200], weights[200:]]):
        hollow = header(tmp_path / "h", part, vocabulary=64 * (i == 0), split=(i, 2, len(weights)))
        with (tmp_path / f"m-0000{i + 1}-of-00002.gguf").open("wb") as file:
            file.write(hollow.head)
            file.truncate(hollow.size)
    (tmp_path / "dead.gguf").symlink_to(tmp_path / "gone.gguf")
    shapes = [FORMAT.read_header(tmp_path / f"m-0000{i}-of-00002.gguf") for i in (1, 2)]
    assert shapes[0] == shapes[1]
    assert shapes[0].weight_bytes == mistral_medium("Q4_K_M").weight_bytes
