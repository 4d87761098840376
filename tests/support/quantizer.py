"""The real quantizer and the stand-in model, in the test cache.

The environment is resolved and built by the product's own resolver and recipe, once; the stand-in
is made by `standin.py` inside it. Neither is ever in a checkout.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mistral_common

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.planner import Outputs
from mmadmin.core.canonical import digest
from mmadmin.core.environments import interpreter, script, variables
from mmadmin.core.formats.checkpoint.parts import QUANTIZER, REQUIREMENTS, pin_requests
from mmadmin.core.formats.checkpoint.tables import read_model
from mmadmin.core.recipes import python_env
from mmadmin.core.spec.lock import Lock, lock_as_json, lock_from_json
from mmadmin.core.store import Store
from mmadmin.host.resolve import Sources, _Resolver
from tests.support.engine import cache_root, toolbox_for

MAKER = Path(__file__).with_name("standin.py")
TEKKEN = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"


@dataclass(frozen=True)
class Quantizer:
    """Where the environment and the stand-in lie."""

    environment: Path
    bf16: Path
    fp8: Path
    data: Path
    """A folder with prose."""


def quantizer_lock(folder: Path) -> Lock:
    """The pins of the quantizer's packages, resolved once for this interpreter."""
    key = digest("mmadmin-test-quantizer-v1", [*REQUIREMENTS, interpreter()])
    kept = folder / f"quantizer-{key[:16]}.json"
    if not kept.exists():
        model = read_model({"source": "hub", "repo": "a/b", "quantize": "FP8_DYNAMIC"})
        request = next(one for one in pin_requests(model) if one.name == QUANTIZER)
        files = _Resolver(Sources(), print).files(request)
        lock = Lock({QUANTIZER: files}, {}, {QUANTIZER: interpreter()})
        kept.write_text(json.dumps(lock_as_json(lock)))
    return lock_from_json(json.loads(kept.read_text()))


def open_quantizer() -> Quantizer:
    """Open the cache; resolve, fetch and build what is missing in it (minutes, the first time)."""
    root = cache_root()
    (root / "store").mkdir(parents=True, exist_ok=True)
    with (root / "quantizer.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        store = Store(root / "store")
        goal = python_env.derivation(quantizer_lock(root), QUANTIZER, REQUIREMENTS)
        realise(goal, store, toolbox_for(store), UNOBSERVED)
        name = Outputs(store).of(goal).object
        assert name is not None
        environment = store.object_path(name)
        key = digest("mmadmin-test-standin-v1", [MAKER.read_text(), name])
        folder = root / f"standin-{key[:16]}"
        if not folder.exists():
            making = root / f"standin-{key[:16]}.part"
            shutil.rmtree(making, ignore_errors=True)
            argv = script(MAKER, str(making), str(TEKKEN))
            env = {**os.environ, **variables(environment), "PYTHONDONTWRITEBYTECODE": "1"}
            subprocess.run(argv, env=env, check=True, capture_output=True)
            (making / "data").mkdir()
            (making / "text.jsonl").rename(making / "data" / "text.jsonl")
            making.rename(folder)
    return Quantizer(environment, folder / "bf16", folder / "fp8", folder / "data")
