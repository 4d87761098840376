"""`mm top` out of the gate's own exposition."""

from rich.console import Console

from mmadmin.cli.top import _picture, parse, rows
from mmadmin.gate.metrics import Metrics, merge


def exposition(requests: int, tokens: int, ttft: list[float]) -> str:
    """What two gate workers would say, merged."""
    texts = []
    for worker in ("0", "1"):
        metrics = Metrics(worker)
        series = metrics.of(("tiny", "1", "chat"))
        series.requests[200, "ok"] = requests
        series.completion = tokens
        for value in ttft:
            series.ttft.observe(value)
        metrics.queues = lambda: {"tiny": (1, 2), "idle": (0, 0)}
        texts.append(metrics.text())
    return merge(texts).decode()


def test_a_running_request_is_named_by_its_generation_and_owner() -> None:
    """`tiny/2`, not `tiny/tiny/2`; one that has no route yet has a dash."""
    shown = Console(width=120)
    requests = [
        {"key": "k1", "deployment": d, "generation": g, "endpoint": "chat", "state": "prefill",
         "age_s": 1.0, "events": 0}
        for d, g in (("tiny", "tiny/2"), ("", ""))
    ]  # fmt: skip
    with shown.capture() as captured:
        shown.print(_picture([], requests, {"k1": "Ann"}))
    lines = captured.get().splitlines()
    assert any("sk-mm-k1 Ann" in line and " tiny/2 " in line for line in lines)
    assert "tiny/tiny" not in captured.get()


def test_rates_are_those_between_two_looks() -> None:
    """Counters are differences over time, gauges are as they are, workers are summed."""
    before = parse(exposition(10, 100, [0.5]), at=100.0)
    after = parse(exposition(12, 180, [0.5, 0.1, 0.3]), at=102.0)
    idle, tiny = rows(before, after)
    assert idle["deployment"] == "idle"
    assert idle["running"] == idle["waiting"] == idle["requests"] == 0
    assert idle["ttft_ms"] is None
    assert (tiny["running"], tiny["waiting"], tiny["requests"]) == (2, 4, 24)
    assert tiny["requests_per_s"] == 2.0
    assert tiny["tokens_per_s"] == 80.0
    assert tiny["ttft_ms"] == 200
