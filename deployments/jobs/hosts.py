"""What a host's worker reports about its machine, and about jobs that died with an earlier one."""

from __future__ import annotations

from django.conf import settings
from django.utils import timezone

from deployments.broker import feed
from deployments.models import Host
from mmadmin.core.fit.facts import HostFacts


def register(facts: HostFacts) -> Host:
    """Write the host's facts, creating its row the first time."""
    host, _ = Host.objects.update_or_create(
        name=settings.HOST_NAME,
        defaults={"facts": facts.as_json(), "seen_at": timezone.now()},
    )
    feed.announce("host", host.pk)
    return host
