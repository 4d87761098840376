"""What the packages of some environments need to run together, as overlays with their reasons."""

from __future__ import annotations

from collections.abc import Iterator

from mmadmin.core.engines.vllm.spec import VllmBuild
from mmadmin.core.recipes.python_env import Overlay
from mmadmin.core.spec.lock import Lock, LockedFile

TORCHVISION: dict[str, str] = {
    "0.28.0": "775cb7a87f9b26eb9fcb498f79313560a4878968d458acaf95b9b5ae6b4656d3",
}
"""Version → SHA-256 of its `__init__.py`."""
_SCHEMAS = """\
@@ -0,0 +1,5 @@
+import torch.library
+
+_schemas = torch.library.Library("torchvision", "FRAGMENT")
+for _name in ("nms", "qnms"):
+    _schemas.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def corrections(build: VllmBuild, lock: Lock, name: str) -> list[Overlay]:
    """The overlays of the environment that the lock's list `name` makes."""
    wheels = {wheel.path.partition("-")[0]: wheel for wheel in lock.of(name)}
    return [*_metadata(build), *_torchvision(wheels)]


def _metadata(build: VllmBuild) -> Iterator[Overlay]:
    """The build for CPUs is a package of another name; vLLM looks itself up as `vllm`."""
    if not build.is_for_cpus:
        return
    version = f"{build.version}+cpu"
    lines = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {version}")
    yield Overlay(
        f"vllm-{version}.dist-info/METADATA",
        "",
        "".join((f"@@ -0,0 +1,{len(lines)} @@\n", *(f"+{line}\n" for line in lines))),
        "vLLM finds its version and its platform in the metadata of a package named vllm",
    )


def _torchvision(wheels: dict[str, LockedFile]) -> Iterator[Overlay]:
    """The index has torchvision for CUDA only, which does not load its operators beside `+cpu`."""
    torch, vision = wheels.get("torch"), wheels.get("torchvision")
    if torch is None or vision is None or "+cpu" not in torch.path or "+cpu" in vision.path:
        return
    sha256 = TORCHVISION.get(vision.path.split("-")[1])
    if sha256 is not None:
        yield Overlay(
            "torchvision/__init__.py",
            sha256,
            _SCHEMAS,
            "its operators for CUDA are not loaded beside torch for CPUs; their schemas must exist",
        )
