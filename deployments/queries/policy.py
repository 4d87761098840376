"""The policy of sources: its rules, what they say of something, requests for exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.db.models import Q

from deployments.models import PolicyRequest, PolicyRule, RequestState, Role, User
from deployments.queries.paging import Page, paged, require
from mmadmin.core.errors import NotFound

if TYPE_CHECKING:
    from mmadmin.core.source_policy import Rule


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A rule that holds, with who made it; a default was made by nobody."""

    rule: Rule
    record: PolicyRule | None


def policy(actor: User) -> list[RuleRow]:
    """Every rule that holds, by kind."""
    require(actor, Role.OPERATOR)
    made = {(row.kind, row.pattern): row for row in PolicyRule.objects.select_related("by")}
    in_force = PolicyRule.policy().in_force
    return [RuleRow(rule, made.get((rule.kind, rule.pattern))) for rule in in_force]


def decision(actor: User, kind: str, subject: str) -> Rule:
    """The rule that decides on something that a deployment could name. Raises `InvalidInput`."""
    require(actor, Role.OPERATOR)
    from mmadmin.core.source_policy import normal_pattern

    return PolicyRule.policy().decide(kind, normal_pattern(kind, subject))


def requests(actor: User, *, page: int = 1) -> Page[PolicyRequest]:
    """Requests for exceptions, those that wait first: an admin sees all, others their own."""
    require(actor, Role.OPERATOR)
    waiting = PolicyRequest.objects.annotate(waiting=Q(state=RequestState.WAITING))
    rows = waiting.select_related("by", "answered_by").order_by("-waiting", "-pk")
    return paged(rows if actor.at_least(Role.ADMIN) else rows.filter(by=actor), page)


def exception(actor: User, request_id: int) -> PolicyRequest:
    """One request, for an admin. Raises `NotFound`."""
    require(actor, Role.ADMIN)
    found = PolicyRequest.objects.select_related("by").filter(pk=request_id).first()
    if found is None:
        raise NotFound(f"there is no request {request_id}")
    return found
