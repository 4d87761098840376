"""Reports of generations, as a job would have written them."""

from __future__ import annotations

from typing import Any

from deployments.models import Generation, GenerationReport


def report(generation: Generation, **made: Any) -> None:
    """Give the generation these reports by kind; one that is None is left out."""
    for kind, data in made.items():
        if data is not None:
            GenerationReport.objects.update_or_create(
                generation=generation, kind=kind, defaults={"data": data, "made_by": "a test"}
            )
