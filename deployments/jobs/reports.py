"""Reports of a generation: written under the lease of the job that made them, one row a kind.

A kind is a member of `ReportKind`; who makes it puts its data under that kind. Large data lie in
the host's store, kept by a root of their own for as long as the records are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.utils import timezone

from deployments.jobs import lease
from deployments.models import REPORT_FILE, Generation, GenerationReport, Job, ReportKind
from mmadmin.core.store import Store

INLINE_MAX_BYTES = 1 << 20
"""Larger data go into the store: a row is read whole."""
ROOT_KIND = "report"


def write(
    generation: Generation, made: Mapping[ReportKind, Any], job: Job, store: Store
) -> list[str]:
    """Replace the generation's reports of these kinds; returns the kinds. Raises `LeaseLost`."""
    rows = {kind: _kept(generation, kind, data, store) for kind, data in made.items()}
    with lease.fenced(job):
        Generation.objects.filter(pk=generation.pk).update(changed_at=timezone.now())
        for kind, kept in rows.items():
            GenerationReport.objects.update_or_create(
                generation=generation,
                kind=kind,
                defaults={**kept, "made_by": f"{job.noun} {job.pk}", "at": timezone.now()},
            )
    return sorted(rows)


def _kept(generation: Generation, kind: ReportKind, data: Any, store: Store) -> dict[str, Any]:
    """The fields that hold the data: in the row, or in the store."""
    text = json.dumps(data)
    if len(text) <= INLINE_MAX_BYTES:
        return {"data": data, "object_name": ""}
    with store.lease(f"report {kind} of {generation.uid}") as held, store.staging(held) as staging:
        (staging.out / REPORT_FILE).write_text(text, encoding="utf-8")
        name = store.seal(staging, f"{kind}-report").name
        reason = f"{kind} of {generation.uid}"
        store.add_root(ROOT_KIND, f"{generation.uid}/{kind}", name, reason)
    return {"data": None, "object_name": name}
