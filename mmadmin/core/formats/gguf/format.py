"""GGUF as a model format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmadmin.core.build.recipe import Toolbox
from mmadmin.core.engines.protocol import ModelFacts
from mmadmin.core.formats.gguf.check import ask
from mmadmin.core.formats.gguf.header import read_header, tensor_digests
from mmadmin.core.formats.gguf.sets import GgufSet, group, select
from mmadmin.core.formats.gguf.shards import find_set
from mmadmin.core.formats.protocol import ModelFormat, RepoFile

SUFFIX = ".gguf"


class Gguf:
    """Single GGUF files and shard sets."""

    kind = "gguf"

    def owns(self, path: str) -> bool:
        """By its ending."""
        return path.lower().endswith(SUFFIX)

    def group(self, files: Iterable[RepoFile]) -> Sequence[GgufSet]:
        """The sets of a listing, models first."""
        return group(files)

    def select(self, files: Iterable[RepoFile], selector: str | None) -> GgufSet:
        """The one complete model that a quant, a file or a folder means."""
        return select(files, selector)

    def facts_of(self, report: Mapping[str, Any]) -> ModelFacts:
        """A `verify-gguf` report as `ModelFacts`; what the file does not say is 0."""

        def number(name: str) -> int:
            return int(report.get(name) or 0)

        return ModelFacts(
            architecture=str(report.get("architecture") or ""),
            size_bytes=number("size_bytes"),
            layers=number("layers"),
            context_length=number("context_length"),
            embedding_length=number("embedding_length"),
            head_count=number("head_count"),
            head_count_kv=number("head_count_kv"),
            metadata=dict(report),
        )

    def read_template(self, path: Path, tools: Toolbox) -> str | None:
        """The chat template in the header; any shard stands for its set."""
        template = ask(find_set(path), tools, template=True)["template"]
        return template if isinstance(template, str) and template else None

    def difference(self, before: Path, after: Path) -> tuple[str, Sequence[str]]:
        """Which tensors have other bytes."""
        was, now = (tensor_digests(path, read_header(path)) for path in (before, after))
        names = tuple(
            name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)
        )
        if not names:
            return "only metadata differs", ()
        return f"{len(names)} of {len(was)} tensors differ", names


FORMAT: ModelFormat = Gguf()
