"""Predicted beside measured."""

from __future__ import annotations

from decimal import Decimal

from mmadmin.core.engines.llama_server.load_log import buffers
from mmadmin.core.engines.llama_server.memory import predict
from mmadmin.core.fit.estimate import (
    MIB,
    Calibration,
    Device,
    Row,
    compare_buffers,
    compare_devices,
    learn,
)
from tests.core.formats.gguf.tables import llama
from tests.support.llama import run_shape

LOG = """\
0.00.15 I load_tensors:   CPU_Mapped model buffer size =   119.54 MiB
0.00.16 I load_tensors:   CPU_REPACK model buffer size =    84.34 MiB
0.00.17 I load_tensors:        CUDA0 model buffer size =  1000.00 MiB
0.00.17 I load_tensors:        CUDA1 model buffer size =   900.50 MiB
0.00.18 I llama_context:   CUDA_Host  output buffer size =     0.12 MiB
0.00.18 I llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB
0.00.18 I llama_kv_cache:      CUDA0 KV buffer size =    20.00 MiB
0.00.19 I sched_reserve:      CUDA0 compute buffer size =    18.02 MiB
0.00.19 I sched_reserve:  CUDA_Host compute buffer size =     1.02 MiB
0.00.19 I srv  llama_server: model loaded
"""
SMALL = llama(
    layers=4, embedding=256, feed_forward=512, heads=8, kv_heads=2, head_size=32, vocabulary=1024
)
CARD = Device(80, 40 << 30, 39 << 30)


def test_buffers_are_read_from_the_log() -> None:
    """Sizes by device and part; two caches of one device are added up."""
    assert buffers(LOG.splitlines()) == {
        -1: {
            "mapped": 11954 * MIB // 100,
            "repacked": 8434 * MIB // 100,
            "output": 12 * MIB // 100,
            "compute": 102 * MIB // 100,
        },
        0: {"weights": 1000 * MIB, "cache": 84 * MIB, "compute": 1802 * MIB // 100},
        1: {"weights": 90050 * MIB // 100},
    }
    assert buffers(["nothing of the kind"]) == {}


def test_rows_say_by_how_much_it_was_off() -> None:
    """A row has both sizes and the error in thousandths, above or below."""
    assert Row("x", 103, 100).error_permille == 30
    assert Row("x", 97, 100).error_permille == -30
    assert Row("x", 97, 100).as_json()["error_permille"] == -30
    prediction = predict(SMALL, run_shape(context=1024))
    cache = prediction.host["cache"] / MIB
    log = [f" I x:  CPU KV buffer size = {cache:.2f} MiB"]
    rows = compare_buffers(prediction, buffers(log))
    assert [(r.part, r.error_permille) for r in rows] == [("host cache", 0)]


def test_the_context_is_learned_from_what_a_process_held() -> None:
    """The difference on a GPU becomes the CUDA context of its architecture."""
    prediction = predict(
        SMALL, run_shape(context=1024, tensor_split=(Decimal(1), Decimal(1))), [CARD, CARD]
    )
    rest = [sum(p.values()) - p["context"] for p in prediction.devices]
    held = {0: rest[0] + 500 * MIB, 1: rest[1] + 510 * MIB}
    assert [r.part for r in compare_devices(prediction, held)] == ["GPU 0", "GPU 1"]
    learned = learn(Calibration({70: 1}), prediction, held, [CARD, CARD])
    assert learned == Calibration({70: 1, 80: 510 * MIB})
    again = predict(SMALL, run_shape(context=1024), [CARD], calibration=learned)
    assert again.devices[0]["context"] == 510 * MIB


def test_less_than_predicted_teaches_nothing() -> None:
    """Less than its buffers, or gigabytes more, says nothing about the context."""
    prediction = predict(SMALL, run_shape(context=1024), [CARD])
    assert learn(Calibration(), prediction, {0: 9 << 30}, [CARD]) == Calibration()
    assert learn(Calibration(), prediction, {0: 1}, [CARD]) == Calibration()
