"""What an activation will do, told before: overlap or swap, who waits how long, what must go first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmadmin.core.fit.estimate import Estimate
from mmadmin.core.fit.facts import GpuFacts, GpuProcess, HostFacts
from mmadmin.core.fit.placement import (
    Footprint,
    Running,
    everywhere,
    fits_beside,
    footprint,
    footprint_from_json,
)
from mmadmin.core.fit.preview import (
    START_S,
    USUAL_DISK,
    Load,
    Situation,
    load_time,
    preview,
)

GIB = 2**30


def facts(*free_gib: float, memory_gib: float = 64) -> HostFacts:
    """A host with cards of 32 GiB, so much of each free."""
    return HostFacts(
        arch="x86_64",
        os="linux",
        libc="glibc-2.36",
        cpu_model="test",
        cpu_features=(),
        cpu_count=8,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=int(memory_gib * GIB),
        compiler="",
        cuda="12.8",
        gpus=tuple(
            GpuFacts(n, "V100", "7.0", 32 * GIB, int(free * GIB)) for n, free in enumerate(free_gib)
        ),
    )


def holds(*gib: float, host_gib: float = 1) -> Footprint:
    """So much on each card."""
    host = int(host_gib * GIB)
    return Footprint(
        tuple(range(len(gib))), tuple(int(size * GIB) for size in gib), host, host, host
    )


NOW = Situation(
    target="chat/2",
    needs=[holds(20, 20)],
    mode="auto",
    load=Load(81.4, measured=True),
    drain_s=300,
    facts=facts(31, 31),
    live="chat/1",
    leaving=Running("chat", {0: 20 * GIB, 1: 20 * GIB}, GIB),
)


def test_both_fit() -> None:
    """Nobody waits; the live engine ends afterwards."""
    found = preview(NOW)
    assert (found.outlook, found.waits_s, found.ends) == ("overlap", 0.0, ("chat/1",))
    assert "chat/1" in found.message


def test_both_do_not_fit() -> None:
    """New requests wait as long as its own loading took; the words name the card and the bytes."""
    found = preview(replace(NOW, facts=facts(11, 31)))
    assert (found.outlook, found.waits_s, found.drain_s) == ("swap", 81.4, 300)
    assert "GPU 0 is short of 9.2 GiB" in found.message


def test_it_does_not_even_fit_alone() -> None:
    """It is refused before anything changes, with the one deployment whose end would make room."""
    crowded = replace(
        NOW,
        facts=facts(2, 2),
        leaving=Running("chat", {0: 4 * GIB, 1: 4 * GIB}, GIB),
        others=[Running("tiny", {0: GIB}), Running("images", {0: 18 * GIB, 1: 18 * GIB})],
    )
    found = preview(crowded)
    assert (found.outlook, found.ends, found.stop_first) == ("refused", (), ("images",))
    assert found.message.endswith("stop images first")
    alone = preview(replace(crowded, others=[]))
    assert (alone.outlook, alone.stop_first) == ("refused", ())


def test_the_file_s_own_word_counts() -> None:
    """A swap that is asked for is one; an overlap that is asked for and has no room is refused."""
    assert preview(replace(NOW, mode="swap")).outlook == "swap"
    refused = preview(replace(NOW, mode="overlap", facts=facts(11, 31)))
    assert refused.outlook == "refused"
    assert "activation.mode" in refused.message


def test_it_names_the_gpus() -> None:
    """Those that the activation would choose; none where it is refused or not known."""
    one = replace(NOW, needs=everywhere([holds(8)], facts(11, 31)), facts=facts(11, 31))
    assert preview(one).devices == (1,)
    assert preview(replace(one, facts=facts(1, 1), leaving=None, live="")).devices is None
    assert preview(one).as_json()["devices"] == [1]


def test_nothing_is_live() -> None:
    """Clients wait for the loading, nobody is held, nothing ends."""
    found = preview(replace(NOW, live="", leaving=None))
    assert (found.outlook, found.waits_s, found.ends, found.drain_s) == ("overlap", 81.4, (), 0)


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"needs": ()}, "never predicted"),
        ({"facts": None}, "has not reported yet"),
        ({"facts": facts(11, 31), "leaving": None}, "what chat/1 holds is not known"),
    ],
)
def test_what_is_not_known_is_said(lacks: dict[str, object], message: str) -> None:
    """No guess: the preflight will decide."""
    found = preview(replace(NOW, **lacks))  # type: ignore[arg-type]
    assert (found.outlook, found.waits_s) == ("unknown", None)
    assert message in found.message


def test_what_is_gone_from_the_store_comes_first() -> None:
    """It must be built again; another host's store cannot be seen, which hinders nothing."""
    found = preview(replace(NOW, missing=("0" * 64 + "-model",)))
    assert (found.outlook, found.build_first) == ("refused", ("0" * 64 + "-model",))
    assert "1 object that it needs" in found.message
    elsewhere = preview(replace(NOW, missing=None))
    assert (elsewhere.outlook, elsewhere.build_first) == ("overlap", None)


def test_it_says_what_the_preflight_would() -> None:
    """The same facts lead to the same mode as `fits_beside`, which decides at the activation."""
    for free in (31, 20.3, 20.2, 11, 0.5):
        now = replace(NOW, facts=facts(free, 31))
        assert now.facts is not None
        decided = fits_beside(now.needs[0], now.facts, now.leaving)
        told = {"overlap": "overlap", "swap": "swap", "refuse": "refused"}[decided.mode]
        assert preview(now).outlook == told


def test_how_long_loading_takes() -> None:
    """Its own measurement first, then its host's speed, then a usual disk's."""
    report = {"measured": {"load_ms": 81_400}}
    assert load_time(report, 10 * GIB) == Load(81.4, measured=True)
    assert load_time(None, 10 * GIB, GIB) == Load(START_S + 10, measured=False)
    assert load_time({"rows": []}, USUAL_DISK).seconds == START_S + 1


def test_what_an_engine_holds_is_told_by_the_driver() -> None:
    """Where the driver names the process; else by the prediction. Mapped files are not its own."""
    made = footprint(
        Estimate(
            devices=({"weights": 20 * GIB}, {"weights": 19 * GIB}),
            host={"mapped": 3 * GIB, "compute": GIB},
            context=1024,
            layer_devices=(0, 1),
        ),
        (2, 3),
    )
    assert footprint_from_json(json.loads(json.dumps(made.as_json()))) == made
    assert (made.own_bytes, made.resident_bytes) == (GIB, GIB)
    idle = facts(31, 31)
    assert made.running("chat", 7, idle) == Running("chat", {2: 20 * GIB, 3: 19 * GIB}, GIB)
    busy = replace(
        idle, gpus=(replace(idle.gpus[0], processes=(GpuProcess(7, 5 * GIB),)), idle.gpus[1])
    )
    assert made.running("chat", 7, busy).devices == {0: 5 * GIB}


def test_as_json_has_whole_numbers() -> None:
    """Milliseconds, and null for what cannot be told."""
    told = preview(replace(NOW, facts=facts(11, 31))).as_json()
    assert (told["outlook"], told["waits_ms"], told["load_ms"]) == ("swap", 81400, 81400)
    assert preview(replace(NOW, needs=())).as_json()["waits_ms"] is None


def test_what_is_on_trial_gives_way() -> None:
    """It ends for an activation that does not fit beside it, and for no other."""
    trial = Running("other/4", {0: 15 * GIB, 1: 15 * GIB}, GIB)
    tight = replace(NOW, facts=facts(10, 10), trials=[trial])
    found = preview(tight)
    assert (found.outlook, found.ends) == ("overlap", ("chat/1", "other/4"))
    assert found.message.endswith("; the trial of other/4 ends")
    assert preview(replace(tight, trials=[])).outlook == "swap"
    roomy = preview(replace(NOW, trials=[trial]))
    assert (roomy.outlook, roomy.ends) == ("overlap", ("chat/1",))
    own = preview(replace(NOW, trials=[replace(trial, name="chat/3")]))
    assert (own.outlook, own.ends) == ("overlap", ("chat/1", "chat/3"))


def test_what_is_on_trial_stays_where_its_end_would_not_help() -> None:
    """Who swaps anyway, by the file or for want of memory, ends no trial by it."""
    trial = Running("other/4", {0: 15 * GIB, 1: 15 * GIB}, GIB)
    asked = preview(replace(NOW, facts=facts(10, 10), trials=[trial], mode="swap"))
    assert (asked.outlook, asked.ends) == ("swap", ("chat/1",))
    small = replace(trial, devices={0: GIB})
    forced = preview(replace(NOW, facts=facts(10, 10), trials=[small]))
    assert (forced.outlook, forced.ends) == ("swap", ("chat/1",))


def test_one_on_trial_takes_over_at_once() -> None:
    """Its engine is loaded and proved: nothing is started, whatever the memory."""
    found = preview(replace(NOW, facts=facts(1, 1), tried=True))
    assert (found.outlook, found.waits_s, found.load.seconds) == ("overlap", 0.0, 0.0)
    assert found.message == "its engine runs already, on trial: it takes over from chat/1"
