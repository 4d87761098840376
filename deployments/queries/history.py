"""What became of a deployment: generations, live spans, differences, the export."""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.models import Max, Prefetch
from django.utils import timezone

from deployments.models import (
    Activation,
    AuditEvent,
    Build,
    BuildStep,
    Deployment,
    Generation,
    GenerationReport,
    ReportKind,
    Role,
    Transition,
    User,
)
from deployments.queries.lookups import deployment_named, no_generation
from deployments.queries.paging import (
    PER_PAGE,
    Page,
    grouped,
    paged,
    recorded,
    reports_of,
    require,
)
from mmadmin.core.generations.lifecycle import GenerationState

if TYPE_CHECKING:
    from mmadmin.core.generations.diff import DiffRow


Reports = Mapping[int, Mapping[str, Any]]
"""Data of reports by the generation's id and by kind."""


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


def history(actor: User, name: str, *, page: int = 1, per_page: int = PER_PAGE) -> Page[HistoryRow]:
    """A deployment's generations, newest first, with how each went."""
    require(actor)
    of = deployment_named(name)
    every = of.generations.select_related("author", "parent__deployment", "deployment").defer(
        *recorded("", "parent")
    )
    found = paged(every, page, per_page)
    rows = _history_rows(actor, found.rows, live_id=of.live_id)
    return Page(rows, found.page, found.pages, found.total, found.per_page)


def generation(actor: User, name: str, number: int) -> HistoryRow:
    """One generation with all of its transitions. Raises `NotFound`."""
    require(actor)
    of = deployment_named(name)
    found = (
        of.generations.select_related("author", "parent__deployment", "deployment")
        .defer(*recorded("parent"))
        .filter(number=number)
        .first()
    )
    if found is None:
        raise no_generation(name, number)
    return _history_rows(actor, [found], live_id=of.live_id)[0]


def _secretive(actor: User, ids: Iterable[int]) -> set[int]:
    """Those of the generations whose template is a file of a host: its text is for operators."""
    if actor.at_least(Role.OPERATOR):
        return set()
    texts = Generation.objects.filter(pk__in=set(ids)).values_list("pk", "spec_toml")
    return {pk for pk, text in texts if _names_template_file(text)}


def _names_template_file(spec_toml: str) -> bool:
    try:
        template = tomllib.loads(spec_toml).get("template")
    except ValueError:
        return True
    return isinstance(template, Mapping) and template.get("source") == "file"


OF_TEMPLATE = (ReportKind.TEMPLATE, ReportKind.RENDERING, ReportKind.RENDERS)


def _told(rows: list[DiffRow], secretive: set[int], *generations: int | None) -> list[DiffRow]:
    """The rows without those of a template that is not shown."""
    if secretive.isdisjoint(generations):
        return rows
    return [row for row in rows if row.section not in {"template", "rendering"}]


def generation_builds(actor: User, of: Generation) -> list[Build]:
    """Every build of a generation with its steps, oldest first."""
    require(actor)
    rows = of.builds.select_related("actor").defer("spec_toml", "plan").order_by("pk")
    return list(rows.prefetch_related(Prefetch("steps", BuildStep.objects.order_by("position"))))


def _history_rows(
    actor: User,
    generations: Sequence[Generation],
    *,
    live_id: int | None,
    reports: Reports | None = None,
    secretive: set[int] | None = None,
) -> list[HistoryRow]:
    ids = [g.pk for g in generations]
    if secretive is None:
        secretive = _secretive(actor, [*ids, *(g.parent_id for g in generations if g.parent_id)])
    newest = (
        Build.objects.filter(generation__in=ids)
        .values("generation")
        .annotate(newest=Max("id"))
        .order_by()
        .values("newest")
    )
    builds = {b.generation_id: b for b in Build.objects.filter(pk__in=newest)}
    activations = grouped(
        Activation.objects.filter(target__in=ids).select_related("actor"),
        lambda activation: activation.target_id,
    )
    transitions = grouped(
        Transition.objects.filter(generation__in=ids).select_related("actor"),
        lambda transition: transition.generation_id,
    )
    changes = _changes(generations, reports)
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
                changes=_told(changes.get(g.pk, []), secretive, g.pk, g.parent_id),
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


def reports(actor: User, of: Generation) -> dict[str, GenerationReport]:
    """Every report of a generation, by kind, with who made it when.

    Viewers are not shown a template that is a file of a host, nor what it renders.
    """
    require(actor)
    hidden = OF_TEMPLATE if _secretive(actor, [of.pk]) else ()
    return {row.kind: row for row in of.reports.order_by("kind") if row.kind not in hidden}


SAID = ("generation.mark", "generation.pin", "generation.unpin")


def said(actor: User, name: str, number: int) -> list[AuditEvent]:
    """What people said of a generation by marks and pins, newest first."""
    require(actor)
    events = AuditEvent.objects.filter(subject=f"generation:{name}/{number}", verb__in=SAID)
    return list(events.select_related("actor")[:PER_PAGE])


@dataclass(frozen=True, slots=True)
class HistoryExport:
    """Everything that is known of a deployment's generations."""

    deployment: Deployment
    at: datetime
    rows: list[HistoryRow]
    """Oldest first."""
    builds: Mapping[int, Sequence[Build]]
    """By the generation's id, oldest first."""
    activations: list[Activation]
    reports: Reports


def export_history(actor: User, name: str) -> HistoryExport:
    """A deployment's whole history: what was asked for, pinned, done, by whom, when.

    Holds no secret and no usage. The file is complete: with the sources that its locks name, each
    generation can be built again to the same hashes.
    """
    require(actor)
    of = deployment_named(name)
    generations = list(
        of.generations.select_related("author", "parent__deployment", "deployment")
        .defer(*recorded("parent"))
        .order_by("number")
    )
    builds = grouped(
        Build.objects.filter(deployment=of, dry_run=False)
        .select_related("actor", "deployment", "generation__deployment")
        .defer("spec_toml", "plan", *recorded("generation"))
        .prefetch_related(Prefetch("steps", BuildStep.objects.order_by("position")))
        .order_by("pk"),
        lambda build: build.generation_id,
    )
    activations = (
        of.activations.select_related("deployment", "target", "previous", "actor")
        .defer(*recorded("target", "previous"))
        .order_by("pk")
    )
    found = reports_of((g.pk for g in generations), *ReportKind)
    secretive = _secretive(actor, [g.pk for g in generations])
    shown = {
        g.pk: {
            k: v for k, v in found[g.pk].items() if k not in OF_TEMPLATE or g.pk not in secretive
        }
        for g in generations
    }
    rows = _history_rows(actor, generations, live_id=of.live_id, reports=found, secretive=secretive)
    return HistoryExport(of, timezone.now(), rows, builds, list(activations), shown)


def diff(actor: User, name: str, a: int, b: int) -> list[DiffRow]:
    """What differs from generation `a` to generation `b`."""
    require(actor)
    of = deployment_named(name)
    found = {g.number: g for g in of.generations.filter(number__in=[a, b])}
    for number in (a, b):
        if number not in found:
            raise no_generation(name, number)
    return differences(actor, found[a], found[b])


KNOWN_DIFFERENCES = 4096


def differences(actor: User, before: Generation, after: Generation) -> list[DiffRow]:
    """What differs between two generations, as far as it was recorded and may be shown."""
    ids = [before.pk, after.pk]
    return _told(_differences(before, after), _secretive(actor, ids), *ids)


def _differences(before: Generation, after: Generation) -> list[DiffRow]:
    """What differs, remembered.

    A history asks for the same pairs again and again: what was compared is remembered for as long
    as neither generation has changed since.
    """
    known = _known_differences.get(_pair(before, after))
    if known is None:
        known = _compared(before, after, reports_of([before.pk, after.pk], *COMPARED))
    return list(known)


def _compared(before: Generation, after: Generation, reports: Reports) -> list[DiffRow]:
    was, now = _recorded(before, reports[before.pk]), _recorded(after, reports[after.pk])
    found: list[DiffRow] = []
    if was != now:
        from mmadmin.core.generations.diff import Side
        from mmadmin.core.generations.diff import diff as core_diff

        found = core_diff(Side(**was), Side(**now))
    _known_differences[_pair(before, after)] = found
    if len(_known_differences) > KNOWN_DIFFERENCES:
        _known_differences.popitem(last=False)
    return found


def _changes(
    generations: Sequence[Generation], reports: Reports | None
) -> dict[int, list[DiffRow]]:
    """What differs from each one's parent; what they recorded is read only where it must be."""
    pairs = [(g.parent, g) for g in generations if g.parent is not None]
    unknown = [pair for pair in pairs if _pair(*pair) not in _known_differences]
    ids = {g.pk for pair in unknown for g in pair}
    whole = Generation.objects.in_bulk(ids)
    if reports is None:
        reports = reports_of(ids, *COMPARED) if ids else {}
    for p, g in unknown:
        _compared(whole.get(p.pk, p), whole.get(g.pk, g), reports)
    return {g.pk: _differences(p, g) for p, g in pairs}


def _pair(before: Generation, after: Generation) -> tuple[object, ...]:
    return (before.pk, before.changed_at, after.pk, after.changed_at)


COMPARED = (
    ReportKind.COMMAND,
    ReportKind.TEMPLATE,
    ReportKind.PROBES,
    ReportKind.MODEL,
    ReportKind.RENDERS,
    ReportKind.NEEDS,
)


def _recorded(generation: Generation, reports: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison reads (`core.generations.diff.Side`), which takes long to load."""
    return {
        "spec_toml": generation.spec_toml,
        "lock": generation.lock,
        "graph": generation.graph,
        "argv": reports.get(ReportKind.COMMAND),
        "template": reports.get(ReportKind.TEMPLATE),
        "probes": reports.get(ReportKind.PROBES),
        "model": reports.get(ReportKind.MODEL),
        "renders": reports.get(ReportKind.RENDERS),
        "size_bytes": generation.size_bytes or None,
        "needs": reports.get(ReportKind.NEEDS),
    }


_known_differences: OrderedDict[tuple[object, ...], list[DiffRow]] = OrderedDict()
