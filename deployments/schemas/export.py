"""A deployment's whole history as one JSON document, its parts as in the REST API."""

from __future__ import annotations

from typing import Any

from ninja import Schema

from deployments import queries
from deployments.models import ReportKind
from deployments.schemas.deployments import HistoryOut, TransitionOut
from deployments.schemas.jobs import ActivationOut, BuildRunOut
from mmadmin.core.generations.history_file import HISTORY_FORMAT


def history_document(found: queries.HistoryExport) -> dict[str, Any]:
    """The document of `mm history NAME --export FILE` and of the API's `/export`."""
    of = found.deployment
    return {
        "format": HISTORY_FORMAT,
        "exported_at": found.at.isoformat(),
        "deployment": {
            "name": of.name,
            "public_name": of.public_name,
            "description": of.description,
            "host": of.host.name,
            "created_at": of.created_at.isoformat(),
        },
        "generations": [
            _plain(HistoryOut.of_row(row))
            | {name: getattr(row.generation, name) for name in RECORDED}
            | {kind.value: found.reports[row.generation.pk].get(kind) for kind in ReportKind}
            | {
                "transitions": [_plain(TransitionOut.from_orm(it)) for it in row.transitions],
                "builds": [
                    _plain(BuildRunOut.from_orm(it)) for it in found.builds[row.generation.pk]
                ],
            }
            for row in found.rows
        ],
        "activations": [_plain(ActivationOut.from_orm(it)) for it in found.activations],
    }


RECORDED = ("spec_toml", "lock", "graph", "host_facts")
"""What is needed to make a generation again."""


def _plain(of: Schema) -> dict[str, Any]:
    return of.model_dump(mode="json")
