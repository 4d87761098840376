"""What people look at: every read of the panel, the API and `mm`.

Each query takes the person first, refuses those who may not look, and makes a number of database
queries that does not grow with the rows it returns.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Literal, TypeVar

from django.db.models import Count, F, Max, Model, Prefetch, Q, QuerySet, Sum
from django.utils import timezone

from deployments.models import (
    Activation,
    Alarm,
    AuditEvent,
    Browse,
    Build,
    BuildStep,
    ClientKey,
    Deployment,
    Generation,
    Host,
    LogChunk,
    Replica,
    ReplicaState,
    Role,
    Transition,
    UsageBucket,
    UsageEvent,
    User,
    UserToken,
)
from mmadmin.core.diff import DiffRow, Side
from mmadmin.core.diff import diff as core_diff
from mmadmin.core.errors import InvalidInput, NotFound, Refused
from mmadmin.core.lifecycle import GenerationState, JobState

ACTIVE_JOB = (JobState.QUEUED, JobState.RUNNING)
PER_PAGE = 50
LIVE_WINDOW = timedelta(hours=1)

T = TypeVar("T")
M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    rows: list[T]
    page: int
    """From 1."""
    pages: int
    total: int
    per_page: int


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """A deployment with what is live, what is under way, and how it did in the last hour."""

    deployment: Deployment
    live: Generation | None
    live_since: datetime | None
    newest: Generation | None
    generations: int
    activation: Activation | None
    """Queued or running."""
    build: Build | None
    """Queued or running."""
    replicas: list[Replica]
    """Those that are not stopped or failed."""
    last_activation: Activation | None
    """The newest that ended."""
    alarms: list[Alarm]
    """Open ones."""
    requests_1h: int
    failed_1h: int
    tokens_per_s: float | None
    """Mean generation speed of the requests of the last hour."""
    ttft_ms: int | None

    @property
    def state(self) -> str:
        """live, activating, building, failed, stopped or new."""
        if self.activation is not None:
            return "activating"
        if self.live is not None:
            return "live"
        if self.build is not None:
            return "building"
        if self.newest is None:
            return "new"
        return "failed" if self.newest.state == GenerationState.FAILED else "stopped"


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A generation with how it came to be and how it went."""

    generation: Generation
    build: Build | None
    """The newest."""
    activations: list[Activation]
    """Newest first."""
    live_spans: list[tuple[datetime, datetime | None]]
    """When it was live; an open end = it still is."""
    live_s: int
    """Seconds it was ever live."""
    changes: list[DiffRow]
    """Against its parent; empty for the first."""
    is_live: bool
    transitions: list[Transition] = field(default_factory=list)


def require(actor: User, role: Role = Role.VIEWER) -> None:
    """Raise `Refused` unless the person is active and has at least this role."""
    if not actor.is_active or not actor.at_least(role):
        raise Refused(
            f"{actor.get_username()} may not see this: it takes the role {role.value}",
            remedy="ask an admin",
            role=role.value,
        )


def aware(moment: datetime) -> datetime:
    """The moment with its zone; one without is in UTC."""
    return moment if timezone.is_aware(moment) else moment.replace(tzinfo=UTC)


def paged(rows: QuerySet[M], page: int, per_page: int = PER_PAGE) -> Page[M]:
    """One page of a query; a page beyond the last is the last."""
    total = rows.count()
    pages = max(1, -(-total // per_page))
    page = min(max(1, page), pages)
    start = (page - 1) * per_page
    return Page(list(rows[start : start + per_page]), page, pages, total, per_page)


# --- deployments -----------------------------------------------------------------------------


def deployments_overview(actor: User, *, archived: bool = False) -> list[DeploymentRow]:
    """Every deployment, by name."""
    require(actor)
    return _rows(Deployment.objects.filter(archived_at__isnull=not archived))


def deployment(actor: User, name: str) -> DeploymentRow:
    """One deployment, archived or not. Raises `NotFound`."""
    require(actor)
    rows = _rows(Deployment.objects.filter(name=name))
    if not rows:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return rows[0]


def _rows(which: QuerySet[Deployment]) -> list[DeploymentRow]:
    found = list(which.select_related("host", "live__author", "live__deployment").order_by("name"))
    ids = [row.pk for row in found]
    live_ids = [row.live_id for row in found if row.live_id]
    counts = dict(
        Generation.objects.filter(deployment__in=ids)
        .values_list("deployment")
        .annotate(n=Count("id"))
        .order_by()
    )
    newest_ids = (
        Generation.objects.filter(deployment__in=ids)
        .values("deployment")
        .annotate(newest=Max("id"))
        .order_by()
        .values("newest")
    )
    newest = {
        g.deployment_id: g
        for g in Generation.objects.filter(pk__in=newest_ids).select_related("author", "deployment")
    }
    live_since = dict(
        Transition.objects.filter(generation__in=live_ids, after=GenerationState.LIVE)
        .values_list("generation")
        .annotate(since=Max("at"))
        .order_by()
    )
    running = Activation.objects.filter(deployment__in=ids, state__in=ACTIVE_JOB)
    ended_ids = (
        Activation.objects.filter(deployment__in=ids)
        .exclude(state__in=ACTIVE_JOB)
        .values("deployment")
        .annotate(newest=Max("id"))
        .order_by()
        .values("newest")
    )
    activations = Activation.objects.filter(
        Q(pk__in=running.values("pk")) | Q(pk__in=ended_ids)
    ).select_related("actor", "target__deployment", "previous__deployment", "deployment")
    active: dict[int, Activation] = {}
    ended: dict[int, Activation] = {}
    for activation in activations:
        into = active if activation.state in ACTIVE_JOB else ended
        into[activation.deployment_id] = activation
    builds = {
        build.deployment_id: build
        for build in Build.objects.filter(
            deployment__in=ids, dry_run=False, state__in=ACTIVE_JOB
        ).select_related("generation__deployment", "actor", "deployment")
    }
    replicas = _grouped(
        Replica.objects.filter(generation__deployment__in=ids)
        .exclude(state__in=[ReplicaState.STOPPED, ReplicaState.FAILED])
        .select_related("generation__deployment", "host"),
        lambda replica: replica.generation.deployment_id,
    )
    alarms = _grouped(
        Alarm.objects.filter(deployment__in=ids, cleared_at=None).select_related("generation"),
        lambda alarm: alarm.deployment_id,
    )
    speed = _last_hour([row.name for row in found])
    return [
        DeploymentRow(
            deployment=row,
            live=row.live,
            live_since=live_since.get(row.live_id) if row.live_id else None,
            newest=newest.get(row.pk),
            generations=counts.get(row.pk, 0),
            activation=active.get(row.pk),
            build=builds.get(row.pk),
            replicas=replicas[row.pk],
            last_activation=ended.get(row.pk),
            alarms=alarms[row.pk],
            **speed[row.name],
        )
        for row in found
    ]


def _grouped(rows: Iterable[M], by: Any) -> dict[int, list[M]]:
    groups: dict[int, list[M]] = defaultdict(list)
    for row in rows:
        groups[by(row)].append(row)
    return groups


def _last_hour(names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    since = timezone.now() - LIVE_WINDOW
    empty: dict[str, Any] = {
        "requests_1h": 0,
        "failed_1h": 0,
        "tokens_per_s": None,
        "ttft_ms": None,
    }
    found: dict[str, dict[str, Any]] = defaultdict(lambda: dict(empty))
    events = (
        UsageEvent.objects.filter(deployment__in=names, at__gte=since)
        .values("deployment")
        .annotate(
            n=Count("id"),
            failed=Count("id", filter=Q(outcome="failed")),
            speed=Sum("tokens_per_s_milli", filter=Q(tokens_per_s_milli__gt=0)),
            fast=Count("id", filter=Q(tokens_per_s_milli__gt=0)),
            ttft=Sum("ttft_ms", filter=Q(ttft_ms__gt=0)),
            first=Count("id", filter=Q(ttft_ms__gt=0)),
        )
        .order_by()
    )
    for row in events:
        found[row["deployment"]] = {
            "requests_1h": row["n"],
            "failed_1h": row["failed"],
            "tokens_per_s": row["speed"] / row["fast"] / 1000 if row["fast"] else None,
            "ttft_ms": row["ttft"] // row["first"] if row["first"] else None,
        }
    return found


def history(actor: User, name: str, *, page: int = 1, per_page: int = PER_PAGE) -> Page[HistoryRow]:
    """A deployment's generations, newest first, with how each went."""
    require(actor)
    of = _deployment(name)
    every = of.generations.select_related("author", "parent__deployment", "deployment")
    found = paged(every, page, per_page)
    rows = _history_rows(found.rows, live_id=of.live_id)
    return Page(rows, found.page, found.pages, found.total, found.per_page)


def generation(actor: User, name: str, number: int) -> HistoryRow:
    """One generation with all of its transitions. Raises `NotFound`."""
    require(actor)
    of = _deployment(name)
    found = (
        of.generations.select_related("author", "parent__deployment", "deployment")
        .filter(number=number)
        .first()
    )
    if found is None:
        raise NotFound(f"{name} has no generation {number}")
    return _history_rows([found], live_id=of.live_id)[0]


def _deployment(name: str) -> Deployment:
    found = Deployment.objects.filter(name=name).first()
    if found is None:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return found


def _history_rows(generations: Sequence[Generation], *, live_id: int | None) -> list[HistoryRow]:
    ids = [g.pk for g in generations]
    newest = (
        Build.objects.filter(generation__in=ids)
        .values("generation")
        .annotate(newest=Max("id"))
        .order_by()
        .values("newest")
    )
    builds = {b.generation_id: b for b in Build.objects.filter(pk__in=newest)}
    activations = _grouped(
        Activation.objects.filter(target__in=ids).select_related("actor"),
        lambda activation: activation.target_id,
    )
    transitions = _grouped(
        Transition.objects.filter(generation__in=ids).select_related("actor"),
        lambda transition: transition.generation_id,
    )
    now = timezone.now()
    rows = []
    for g in generations:
        spans = live_spans(transitions[g.pk])
        rows.append(
            HistoryRow(
                generation=g,
                build=builds.get(g.pk),
                activations=activations[g.pk],
                live_spans=spans,
                live_s=int(sum(((end or now) - start).total_seconds() for start, end in spans)),
                changes=differences(g.parent, g) if g.parent else [],
                is_live=g.pk == live_id,
                transitions=transitions[g.pk],
            )
        )
    return rows


def live_spans(transitions: Sequence[Transition]) -> list[tuple[datetime, datetime | None]]:
    """When a generation was live: from each transition to live until the next away from it."""
    spans: list[tuple[datetime, datetime | None]] = []
    for transition in transitions:
        if transition.after == GenerationState.LIVE:
            spans.append((transition.at, None))
        elif transition.before == GenerationState.LIVE and spans and spans[-1][1] is None:
            spans[-1] = (spans[-1][0], transition.at)
    return spans


EXPORT_FORMAT = 1


def export_history(actor: User, name: str) -> dict[str, Any]:
    """A deployment's whole history as JSON data: what was asked for, pinned, done, by whom, when.

    Holds no secret and no usage. The file is complete: with the sources that its locks name, each
    generation can be built again to the same hashes.
    """
    require(actor)
    of = _deployment(name)
    generations = list(
        of.generations.select_related("author", "parent__deployment", "deployment").order_by(
            "number"
        )
    )
    builds = _grouped(
        Build.objects.filter(deployment=of, dry_run=False).select_related("actor").order_by("pk"),
        lambda build: build.generation_id,
    )
    activations = of.activations.select_related("target", "previous", "actor").order_by("pk").all()
    return {
        "format": EXPORT_FORMAT,
        "exported_at": _iso(timezone.now()),
        "deployment": {
            "name": of.name,
            "public_name": of.public_name,
            "description": of.description,
            "host": of.host.name,
            "created_at": _iso(of.created_at),
        },
        "generations": [
            _exported(row, builds[row.generation.pk])
            for row in _history_rows(generations, live_id=of.live_id)
        ],
        "activations": [
            _exported_job(activation)
            | {
                "kind": activation.kind,
                "mode": activation.mode,
                "target": activation.target.number if activation.target else None,
                "previous": activation.previous.number if activation.previous else None,
                "reason": activation.reason,
                "phases": activation.phases,
            }
            for activation in activations
        ],
    }


def _exported(row: HistoryRow, builds: Sequence[Build]) -> dict[str, Any]:
    it = row.generation
    return {
        "number": it.number,
        "parent": it.parent.number if it.parent else None,
        "author": it.author.get_username(),
        "reason": it.reason,
        "created_at": _iso(it.created_at),
        "built_at": _iso(it.built_at),
        "state": it.state,
        "state_reason": it.state_reason,
        "mark": it.mark,
        "pinned": it.pinned,
        "spec_toml": it.spec_toml,
        "lock": it.lock,
        "graph": it.graph,
        "system": it.system,
        "size_bytes": it.size_bytes,
        "host_facts": it.host_facts,
        "command": it.command,
        "template": it.template,
        "probe_report": it.probe_report,
        "changes": [change.as_json() for change in row.changes],
        "live_spans": [[_iso(start), _iso(end)] for start, end in row.live_spans],
        "transitions": [
            {
                "before": t.before,
                "after": t.after,
                "at": _iso(t.at),
                "actor": t.actor.get_username() if t.actor else None,
                "reason": t.reason,
            }
            for t in row.transitions
        ],
        "builds": [_exported_job(build) for build in builds],
    }


def _exported_job(job: Build | Activation) -> dict[str, Any]:
    return {
        "id": job.pk,
        "state": job.state,
        "actor": job.actor.get_username() if job.actor else None,
        "attempts": job.attempts,
        "error": job.error,
        "created_at": _iso(job.created_at),
        "started_at": _iso(job.started_at),
        "ended_at": _iso(job.ended_at),
    }


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def diff(actor: User, name: str, a: int, b: int) -> list[DiffRow]:
    """What differs from generation `a` to generation `b`."""
    require(actor)
    of = _deployment(name)
    found = {g.number: g for g in of.generations.filter(number__in=[a, b])}
    for number in (a, b):
        if number not in found:
            raise NotFound(f"{name} has no generation {number}")
    return differences(found[a], found[b])


_known_differences: OrderedDict[tuple[object, ...], list[DiffRow]] = OrderedDict()
KNOWN_DIFFERENCES = 4096


def differences(before: Generation, after: Generation) -> list[DiffRow]:
    """What differs between two generations, as far as it was recorded.

    A history asks for the same pairs again and again: what was compared is remembered for as long
    as neither generation has changed since.
    """
    pair = (before.pk, before.changed_at, after.pk, after.changed_at)
    known = _known_differences.get(pair)
    if known is None:
        known = _known_differences[pair] = core_diff(_side(before), _side(after))
        if len(_known_differences) > KNOWN_DIFFERENCES:
            _known_differences.popitem(last=False)
    return list(known)


def _side(generation: Generation) -> Side:
    return Side(
        spec_toml=generation.spec_toml,
        lock=generation.lock,
        graph=generation.graph,
        argv=generation.command,
        template=generation.template,
        probes=generation.probe_report,
    )


# --- builds and activations ------------------------------------------------------------------


def builds(actor: User, *, name: str = "", page: int = 1) -> Page[Build]:
    """Builds, newest first; of one deployment, or of all."""
    require(actor)
    rows = Build.objects.select_related("deployment", "generation__deployment", "actor")
    return paged(rows.filter(deployment__name=name) if name else rows, page)


def build(actor: User, build_id: int) -> Build:
    """One build with its steps. Raises `NotFound`."""
    require(actor)
    found = (
        Build.objects.select_related("deployment", "generation__deployment", "actor", "host")
        .prefetch_related(Prefetch("steps", BuildStep.objects.order_by("position")))
        .filter(pk=build_id)
        .first()
    )
    if found is None:
        raise NotFound(f"there is no build {build_id}")
    return found


def browse(actor: User, browse_id: int) -> Browse:
    """One look into a hub repository, with its result once it has ended. Raises `NotFound`."""
    require(actor, Role.OPERATOR)
    found = Browse.objects.select_related("actor", "host").filter(pk=browse_id).first()
    if found is None:
        raise NotFound(f"there is no browse {browse_id}")
    return found


def activations(actor: User, *, name: str = "", page: int = 1) -> Page[Activation]:
    """Activations, newest first; of one deployment, or of all."""
    require(actor)
    rows = Activation.objects.select_related(
        "deployment", "target__deployment", "previous__deployment", "actor"
    )
    return paged(rows.filter(deployment__name=name) if name else rows, page)


def activation(actor: User, activation_id: int) -> Activation:
    """One activation. Raises `NotFound`."""
    require(actor)
    found = (
        Activation.objects.select_related(
            "deployment", "target__deployment", "previous__deployment", "actor", "host"
        )
        .filter(pk=activation_id)
        .first()
    )
    if found is None:
        raise NotFound(f"there is no activation {activation_id}")
    return found


def build_log(
    actor: User,
    *,
    build_id: int = 0,
    step_id: int = 0,
    activation_id: int = 0,
    after_id: int = 0,
    limit: int = 500,
) -> list[LogChunk]:
    """Log chunks after `after_id`, oldest first: of a whole build, a step, or an activation."""
    require(actor)
    given = [n for n in (build_id, step_id, activation_id) if n]
    if len(given) != 1:
        raise InvalidInput("name one of build, step and activation")
    rows = LogChunk.objects.filter(pk__gt=after_id)
    if build_id:
        rows = rows.filter(build=build_id)
    elif step_id:
        rows = rows.filter(step=step_id)
    else:
        rows = rows.filter(activation=activation_id)
    return list(rows.order_by("pk")[: min(max(1, limit), 5000)])


# --- keys, people, hosts, audit --------------------------------------------------------------

KEY_STATES = ("", "active", "suspended", "expired", "revoked")


def keys(actor: User, *, search: str = "", state: str = "", page: int = 1) -> Page[ClientKey]:
    """Client keys, newest first; `search` looks at prefix, owner and note."""
    require(actor, Role.OPERATOR)
    if state not in KEY_STATES:
        raise InvalidInput(f"{state!r} is not a key state", remedy=f"use {KEY_STATES[1:]}")
    now = timezone.now()
    rows = ClientKey.objects.select_related("created_by", "rotated_from")
    for word in search.split():
        rows = rows.filter(
            Q(key_id__startswith=word.removeprefix("sk-mm-"))
            | Q(owner__icontains=word)
            | Q(note__icontains=word)
        )
    expired = Q(expires_at__lte=now)
    if state == "revoked":
        rows = rows.filter(revoked_at__isnull=False)
    elif state == "expired":
        rows = rows.filter(expired, revoked_at=None)
    elif state == "suspended":
        rows = rows.filter(revoked_at=None, suspended_at__isnull=False).exclude(expired)
    elif state == "active":
        rows = rows.filter(revoked_at=None, suspended_at=None).exclude(expired)
    return paged(rows, page)


def key(actor: User, key_id: str) -> ClientKey:
    """One client key. Raises `NotFound`."""
    require(actor, Role.OPERATOR)
    found = (
        ClientKey.objects.select_related("created_by", "rotated_from").filter(key_id=key_id).first()
    )
    if found is None:
        raise NotFound(f"there is no key {key_id}")
    return found


def key_events(actor: User, key_id: str) -> list[AuditEvent]:
    """Who did what to a key, newest first."""
    require(actor, Role.OPERATOR)
    return list(
        AuditEvent.objects.filter(subject=f"key:{key_id}").select_related("actor")[:PER_PAGE]
    )


def audit(
    actor: User, *, search: str = "", verb: str = "", who: str = "", page: int = 1
) -> Page[AuditEvent]:
    """The audit log, newest first. `verb` may be a prefix such as `key.`."""
    require(actor, Role.OPERATOR)
    rows = AuditEvent.objects.select_related("actor")
    for word in search.split():
        rows = rows.filter(Q(summary__icontains=word) | Q(subject__icontains=word))
    if verb:
        rows = rows.filter(verb__startswith=verb)
    if who:
        rows = rows.filter(actor__username=who)
    return paged(rows, page)


ACTIVITY_VERBS = ("deployment.", "generation.", "build.", "activation.")


def activity(actor: User, limit: int = 12) -> list[AuditEvent]:
    """What happened to deployments lately, newest first."""
    require(actor)
    which = Q()
    for verb in ACTIVITY_VERBS:
        which |= Q(verb__startswith=verb)
    return list(AuditEvent.objects.filter(which).select_related("actor")[:limit])


def hosts(actor: User) -> list[Host]:
    """The hosts, by name."""
    require(actor)
    return list(Host.objects.order_by("name"))


def host(actor: User, name: str) -> Host:
    """One host. Raises `NotFound`."""
    require(actor)
    found = Host.objects.filter(name=name).first()
    if found is None:
        raise NotFound(f"there is no host {name}")
    return found


def users(actor: User) -> list[User]:
    """The people, by name."""
    require(actor, Role.ADMIN)
    return list(User.objects.order_by("username"))


def tokens(actor: User) -> list[UserToken]:
    """One's own API tokens, newest first."""
    require(actor)
    return list(UserToken.objects.filter(user=actor))


def alarms(actor: User, *, name: str = "") -> list[Alarm]:
    """Open alarms, newest first."""
    require(actor)
    rows = Alarm.objects.filter(cleared_at=None).select_related("deployment", "generation")
    return list(rows.filter(deployment__name=name) if name else rows)


# --- usage -----------------------------------------------------------------------------------

SUMS = (
    "requests",
    "failed",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "ttft_ms",
    "duration_ms",
)


def usage(
    actor: User,
    *,
    since: datetime,
    until: datetime,
    deployment: str = "",
    key_id: str = "",
    generation: int | None = None,
    by: Literal["hour", "day", "key", "deployment", "generation", "endpoint"] = "hour",
) -> list[dict[str, Any]]:
    """Sums of the books from `since` to `until`, grouped by time, key, deployment or generation.

    Every row holds the group's name(s) and the sums `requests`, `failed`, `prompt_tokens`,
    `completion_tokens`, `cached_tokens`, `reasoning_tokens`, `ttft_ms`, `duration_ms`.
    """
    require(actor)
    since, until = aware(since), aware(until)
    rows = UsageBucket.objects.filter(hour__gte=since, hour__lt=until)
    if deployment:
        rows = rows.filter(deployment=deployment)
    if key_id:
        rows = rows.filter(key_id=key_id)
    if generation is not None:
        rows = rows.filter(generation=generation)
    group = {
        "hour": ("hour",),
        "day": ("hour",),
        "key": ("key_id",),
        "deployment": ("deployment",),
        "generation": ("deployment", "generation"),
        "endpoint": ("endpoint",),
    }.get(by)
    if group is None:
        raise InvalidInput(f"usage cannot be grouped by {by!r}")
    sums = {name: Sum(name) for name in SUMS}
    found = list(rows.order_by(*group).values(*group).annotate(**sums))
    return _by_day(found) if by == "day" else found


def _by_day(hours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hours added up to days: some databases are slow at cutting a time."""
    days: dict[datetime, dict[str, Any]] = {}
    for row in hours:
        day = row["hour"].replace(hour=0)
        into = days.setdefault(day, {"day": day, **dict.fromkeys(SUMS, 0)})
        for name in SUMS:
            into[name] += row[name]
    return list(days.values())


def budgets(actor: User, key_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Tokens that each key used today and this month (UTC), as (day, month).

    Requests that ended in the last seconds may not be in the books yet; the gate's own count is
    what refuses a request.
    """
    require(actor)
    today = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    tokens = Sum(F("prompt_tokens") + F("completion_tokens"))
    rows = (
        UsageBucket.objects.filter(key_id__in=key_ids, hour__gte=today.replace(day=1))
        .order_by()
        .values_list("key_id")
        .annotate(
            month=tokens,
            day=Sum(F("prompt_tokens") + F("completion_tokens"), filter=Q(hour__gte=today)),
        )
    )
    spent = {key_id: (day or 0, month or 0) for key_id, month, day in rows}
    return {key_id: spent.get(key_id, (0, 0)) for key_id in key_ids}


def request(actor: User, request_id: str) -> UsageEvent:
    """One finished request by its id (`x-request-id`): which generation answered it, and how."""
    require(actor)
    found = UsageEvent.objects.filter(pk=request_id).first()
    if found is None:
        raise NotFound(
            f"there is no request {request_id} in the books",
            remedy="one that has not ended, or ended just now, is not there yet",
        )
    return found


def usage_events(
    actor: User, *, key_id: str = "", deployment: str = "", page: int = 1
) -> Page[UsageEvent]:
    """Single requests, newest first: of a key, of a deployment, or all."""
    require(actor, Role.OPERATOR)
    rows = UsageEvent.objects.order_by("-at")
    if key_id:
        rows = rows.filter(key_id=key_id)
    if deployment:
        rows = rows.filter(deployment=deployment)
    return paged(rows, page)
