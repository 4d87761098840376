"""What a shell completes besides commands and options: names of records."""

from __future__ import annotations

from mmadmin.core.errors import MmError


def deployment_names(incomplete: str) -> list[str]:
    """The deployments whose names begin so; none where nothing is set up."""
    from mmadmin.cli.records import actor

    try:
        actor()
        from deployments.models import Deployment

        known = Deployment.objects.filter(name__startswith=incomplete, archived_at=None)
        return list(known.order_by("name").values_list("name", flat=True))
    except MmError:
        return []
