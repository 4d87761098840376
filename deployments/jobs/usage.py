"""Usage records: finished requests from the gates, each counted exactly once.

A gate writes usage to its own spool first, then to a Redis stream. One transaction here inserts
the events (their id is the primary key, so a repeated one changes nothing), adds the new ones to
their hourly buckets and to the sums of their days, and moves the spool's mark; only then are the
stream's entries deleted and the mark told to the gate, which then drops its segments. Whatever
dies in between, the gate sends again, and nothing is lost or counted twice.

The mark only moves over a spool's unbroken sequence: entries that a broker lost hold it back, so
the gate sends them again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from deployments.broker import feed
from deployments.models import (
    SUMS,
    TOKENS_AND_TIMES,
    ClientKey,
    GateSpool,
    Publication,
    UsageBucket,
    UsageDay,
    UsageEvent,
)
from mmadmin.core.errors import InvalidInput
from mmadmin.core.snapshot import USAGE_ACK_KEY, USAGE_STREAM, Usage, usage_from_json

log = logging.getLogger(__name__)

BATCH = 1000
BATCHES_A_RUN = 50
USAGE_ROW = 2
"""The `Publication` row whose lock keeps two collectors apart."""
INT_MAX = 2**31 - 1


Entry = tuple[bytes, Mapping[bytes, bytes]]


def collect() -> int:
    """Take what is in the stream into the usage records; returns how many requests were new."""
    client = feed.client()
    new = 0
    for _ in range(BATCHES_A_RUN):
        entries = cast("list[Entry]", client.xrange(USAGE_STREAM, count=BATCH))
        if not entries:
            break
        usages = list(_readable(entries))
        added, marks = enter(usages)
        new += added
        if marks:
            client.hset(USAGE_ACK_KEY, mapping={gate: str(seq) for gate, seq in marks.items()})
        client.xdel(USAGE_STREAM, *[entry_id for entry_id, _ in entries])
        if len(entries) < BATCH:
            break
    if new:
        feed.announce("usage", new)
    return new


def _readable(entries: Sequence[Entry]) -> Iterable[Usage]:
    for entry_id, fields in entries:
        try:
            yield usage_from_json(fields[b"event"])
        except (KeyError, InvalidInput) as error:
            log.error("usage entry %s cannot be read and is dropped: %s", entry_id, error)  # noqa: TRY400


def enter(usages: Sequence[Usage]) -> tuple[int, dict[str, int]]:
    """Write usage records; returns how many were new, and each spool's mark."""
    with transaction.atomic():
        Publication.objects.get_or_create(pk=USAGE_ROW)
        Publication.objects.select_for_update().get(pk=USAGE_ROW)
        by_id = {usage.id: usage for usage in usages}
        known = set(UsageEvent.objects.filter(pk__in=by_id).values_list("pk", flat=True))
        fresh = [usage for usage_id, usage in by_id.items() if usage_id not in known]
        UsageEvent.objects.bulk_create([_event(usage) for usage in fresh])
        _add_to_buckets(fresh)
        _add_to_days(fresh)
        _touch_keys(fresh)
        return len(fresh), _marks(usages)


def _at(usage: Usage) -> datetime:
    return datetime.fromtimestamp(usage.at, tz=UTC)


def _event(usage: Usage) -> UsageEvent:
    return UsageEvent(
        id=usage.id[:64],
        at=_at(usage),
        key_id=usage.key_id[:16],
        deployment=usage.deployment[:63],
        generation=usage.generation,
        endpoint=usage.endpoint[:32],
        status=usage.status,
        outcome=usage.outcome,
        streamed=usage.streamed,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        exact=usage.exact,
        queue_ms=min(usage.queue_ms, INT_MAX),
        ttft_ms=min(usage.ttft_ms, INT_MAX),
        duration_ms=min(usage.duration_ms, INT_MAX),
        tokens_per_s_milli=min(usage.tokens_per_s_milli, INT_MAX),
    )


def _add_to_buckets(usages: Sequence[Usage]) -> None:
    sums: dict[tuple[datetime, str, str, int, str], dict[str, int]] = defaultdict(_nothing)
    for usage in usages:
        hour = _at(usage).replace(minute=0, second=0, microsecond=0)
        key = (hour, usage.key_id, usage.deployment, usage.generation, usage.endpoint)
        _count(sums[key], usage)
    for (hour, key_id, deployment, generation, endpoint), row in sums.items():
        bucket, _ = UsageBucket.objects.get_or_create(
            hour=hour,
            key_id=key_id,
            deployment=deployment,
            generation=generation,
            endpoint=endpoint,
        )
        UsageBucket.objects.filter(pk=bucket.pk).update(
            **{name: F(name) + value for name, value in row.items()}
        )


def _add_to_days(usages: Sequence[Usage]) -> None:
    sums: dict[tuple[datetime, str, str, int, str], dict[str, int]] = defaultdict(_nothing)
    for usage in usages:
        day = _at(usage).replace(hour=0, minute=0, second=0, microsecond=0)
        for which in (
            ("all", "", 0, ""),
            ("deployment", usage.deployment, 0, ""),
            ("generation", usage.deployment, usage.generation, ""),
            ("key", "", 0, usage.key_id),
        ):
            _count(sums[day, *which], usage)
    for (day, of, deployment, generation, key_id), row in sums.items():
        found, _ = UsageDay.objects.get_or_create(
            day=day, of=of, deployment=deployment, generation=generation, key_id=key_id
        )
        UsageDay.objects.filter(pk=found.pk).update(
            **{name: F(name) + value for name, value in row.items()}
        )


def _nothing() -> dict[str, int]:
    return dict.fromkeys(SUMS, 0)


def _count(row: dict[str, int], usage: Usage) -> None:
    """Add one request to a row of sums."""
    if usage.outcome == "refused":
        row["refused"] += 1
        return
    row["requests"] += 1
    if usage.outcome != "ok":
        row[usage.outcome] += 1
    for name in TOKENS_AND_TIMES:
        row[name] += getattr(usage, name)


def _touch_keys(usages: Sequence[Usage]) -> None:
    """Write when each key was last used; the gate's snapshot does not hold it."""
    last: dict[str, float] = {}
    for usage in usages:
        last[usage.key_id] = max(usage.at, last.get(usage.key_id, 0))
    for key_id, at in last.items():
        moment = datetime.fromtimestamp(at, tz=UTC)
        ClientKey.objects.filter(key_id=key_id).exclude(last_used_at__gte=moment).update(
            last_used_at=moment
        )


def _marks(usages: Sequence[Usage]) -> dict[str, int]:
    """Move each spool's mark over what came without a gap; returns all marks of these spools."""
    came: dict[str, set[int]] = defaultdict(set)
    for usage in usages:
        if usage.gate:
            came[usage.gate].add(usage.seq)
    spools = {spool.gate: spool for spool in GateSpool.objects.filter(gate__in=came)}
    marks: dict[str, int] = {}
    for gate, seqs in came.items():
        spool = spools.get(gate) or GateSpool(gate=gate)
        mark = spool.acked_seq
        while mark + 1 in seqs:
            mark += 1
        marks[gate] = mark
        if mark != spool.acked_seq or spool.pk is None:
            spool.acked_seq, spool.updated_at = mark, timezone.now()
            spool.save()
    return marks
