"""The policy of sources: rules and secrets that admins set, and requests for exceptions."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from deployments.actions.permissions import audit, require
from deployments.models import PolicyRequest, PolicyRule, RequestState, Role, User
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.source_secrets import SourceSecrets, origin_of

REASON_MAX = 1000


def set_rule(actor: User, kind: str, pattern: str, *, allow: bool, reason: str = "") -> PolicyRule:
    """Allow or deny a pattern; replaces what was said of it before."""
    require(actor, Role.ADMIN)
    pattern, reason = _pattern(kind, pattern), _reason(reason)
    with transaction.atomic():
        before = _locked_rule(kind, pattern)
        rule, _ = PolicyRule.objects.update_or_create(
            kind=kind,
            pattern=pattern,
            defaults={"allow": allow, "reason": reason, "by": actor, "at": timezone.now()},
        )
        _audit(actor, "allow" if allow else "deny", kind, pattern, old=before, new=rule)
    return rule


def remove_rule(actor: User, kind: str, pattern: str) -> None:
    """Take a rule back: the next one that matches, or a default, decides."""
    require(actor, Role.ADMIN)
    pattern = _pattern(kind, pattern)
    with transaction.atomic():
        before = _locked_rule(kind, pattern)
        if before is None:
            raise NotFound(
                f"there is no rule for {kind} {pattern}",
                remedy="a default is replaced by a rule with its kind and pattern",
                command="mm policy show",
            )
        PolicyRule.objects.filter(kind=kind, pattern=pattern).delete()
        _audit(actor, "remove", kind, pattern, old=before, new=None)


def request_exception(actor: User, kind: str, pattern: str, *, reason: str) -> PolicyRequest:
    """Ask the admins to allow what the policy refuses."""
    require(actor, Role.OPERATOR)
    pattern, reason = _pattern(kind, pattern), _reason(reason)
    if not reason:
        raise InvalidInput("a request needs a reason", remedy="say what for", field="reason")
    try:
        with transaction.atomic():
            asked = PolicyRequest.objects.create(
                kind=kind, pattern=pattern, reason=reason, by=actor
            )
            audit(
                actor,
                "policy.request",
                f"policy:{kind}",
                f"{actor} asks to allow {kind} {pattern}: {reason}",
                kind=kind,
                pattern=pattern,
                request=asked.pk,
            )
    except IntegrityError as error:
        raise Conflict(
            f"a request for {kind} {pattern} waits already", remedy="an admin answers it"
        ) from error
    return asked


def answer_request(actor: User, request_id: int, *, grant: bool, reason: str) -> PolicyRequest:
    """Grant a request, which becomes a rule, or refuse it with a reason."""
    require(actor, Role.ADMIN)
    reason = _reason(reason)
    if not grant and not reason:
        raise InvalidInput("a refusal needs a reason", remedy="say why", field="reason")
    with transaction.atomic():
        asked = PolicyRequest.objects.select_for_update().filter(pk=request_id).first()
        if asked is None:
            raise NotFound(f"there is no request {request_id}")
        if asked.state != RequestState.WAITING:
            raise Conflict(f"the request for {asked} was {asked.state} already")
        asked.state = RequestState.GRANTED if grant else RequestState.REFUSED
        asked.answer, asked.answered_by, asked.answered_at = reason, actor, timezone.now()
        asked.save(update_fields=["state", "answer", "answered_by", "answered_at"])
        if grant:
            why = reason or f"asked by {asked.by}: {asked.reason}"
            set_rule(actor, asked.kind, asked.pattern, allow=True, reason=why[:REASON_MAX])
        audit(
            actor,
            "policy.grant" if grant else "policy.refuse",
            f"policy:{asked.kind}",
            f"request for {asked} {asked.state}" + (f": {reason}" if reason else ""),
            kind=asked.kind,
            pattern=asked.pattern,
            request=asked.pk,
            asked_by=asked.by.get_username(),
        )
    return asked


def _reason(text: str) -> str:
    text = text.strip()
    if len(text) > REASON_MAX:
        raise InvalidInput(
            f"the reason has {len(text)} characters",
            remedy=f"use at most {REASON_MAX}",
            field="reason",
        )
    return text


def _pattern(kind: str, pattern: str) -> str:
    """The pattern in its form. Raises `InvalidInput`."""
    from mmadmin.core.source_policy import normal_pattern  # loads engines, and every action this

    return normal_pattern(kind, pattern)


def _locked_rule(kind: str, pattern: str) -> PolicyRule | None:
    return PolicyRule.objects.select_for_update().filter(kind=kind, pattern=pattern).first()


def _audit(
    actor: User,
    verb: str,
    kind: str,
    pattern: str,
    *,
    old: PolicyRule | None,
    new: PolicyRule | None,
) -> None:
    audit(
        actor,
        f"policy.{verb}",
        f"policy:{kind}",
        f"{verb} {kind} {pattern}",
        kind=kind,
        pattern=pattern,
        old=_as_json(old),
        new=_as_json(new),
    )


def _as_json(rule: PolicyRule | None) -> dict[str, Any] | None:
    return None if rule is None else {"allow": rule.allow, "reason": rule.reason}


def set_source_secret(actor: User, name: str, origin: str, value: str) -> None:
    """Keep the credential of an origin on this host, for deployment files to name."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        audit(actor, "policy.secret", f"secret:{name}", f"secret {name}", origin=origin_of(origin))
        SourceSecrets(settings.HOME).set(name, origin, value)


def remove_source_secret(actor: User, name: str) -> None:
    """Forget a credential of this host."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        audit(actor, "policy.forget", f"secret:{name}", f"secret {name} forgotten")
        SourceSecrets(settings.HOME).remove(name)
