"""Small pieces of work for a host's worker: hub searches, a store's upkeep, the doctor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from deployments.actions.lookups import unbuilt
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.models import Generation, Host, HostTask, PolicyRule, Role, TaskKind, User
from deployments.queries.lookups import deployment_named, generation_of
from mmadmin.core.errors import Conflict, InvalidInput, NotFound

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REPO_MAX = 200
REVISION = re.compile(r"[\w./-]{1,255}")


def start_task(
    actor: User,
    kind: TaskKind | str,
    *,
    host: str = "",
    params: Mapping[str, Any] | None = None,
    generation: str = "",
) -> HostTask:
    """Ask a host's worker (by default this host's) to do something small.

    `generation` is the uid of the one that it is about, whose host does it. Raises `InvalidInput`
    for what the kind does not take, `NotFound` for an unknown host or generation, `Conflict` while
    the host is doing the same.
    """
    require(actor, Role.OPERATOR)
    kind = _kind(kind)
    checked = _params(kind, params or {})
    if kind is TaskKind.HUB_SEARCH:
        from mmadmin.core.source_policy import Access

        Access(PolicyRule.policy()).check_hub(checked["repo"], "repo")
    about = _generation(kind, generation)
    on = about.deployment.host if about else _host(host or settings.HOST_NAME)
    subject = checked.get("repo") or (about.uid if about else on.name)
    try:
        with transaction.atomic():
            task = HostTask.objects.create(
                kind=kind, host=on, params=checked, generation=about, actor=actor
            )
            enqueue_on_commit(task)
            audit(actor, f"host.{kind.value}", f"host:{on}", f"{kind.value} of {subject}")
            feed.announce_job(task)
    except IntegrityError as error:
        raise Conflict(
            f"{kind.value} is under way on {on} already", remedy="wait for it, or cancel it"
        ) from error
    return task


def search_hub(
    actor: User, repo: str, *, revision: str = "main", options: dict[str, Any] | None = None
) -> HostTask:
    """Ask the host's worker which models a hub repository has, and whether they fit."""
    params = {"repo": repo, "revision": revision, "options": options}
    return start_task(actor, TaskKind.HUB_SEARCH, params=params)


def cancel_task(actor: User, task_id: int) -> HostTask:
    """Cancel a task: at once when it waits, else at its worker's next step."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        tasks = HostTask.objects.select_related("host", "generation__deployment")
        task = tasks.filter(pk=task_id).first()
        if task is None:
            raise NotFound(f"there is no task {task_id}")
        if not task.cancel():
            raise Conflict(f"{task.kind} has ended already ({task.state})")
        audit(actor, "host.cancel", f"host:{task.host}", f"cancel of {task.kind}")
        feed.announce_job(task)
    return task


def _kind(kind: TaskKind | str) -> TaskKind:
    try:
        return TaskKind(kind)
    except ValueError as error:
        raise InvalidInput(
            f"{kind!r} is not a kind of task",
            remedy=f"use {', '.join(TaskKind.values)}",
            field="kind",
        ) from error


def _host(name: str) -> Host:
    if name == settings.HOST_NAME:
        return Host.objects.get_or_create(name=name)[0]
    on = Host.objects.filter(name=name).first()
    if on is None:
        raise NotFound(f"there is no host {name}", remedy="it appears when its worker starts")
    return on


def _generation(kind: TaskKind, uid: str) -> Generation | None:
    """The generation that a task is about. Only a description is about one."""
    if (kind is TaskKind.DESCRIBE) != bool(uid):
        verb = "needs" if kind is TaskKind.DESCRIBE else "is not about"
        raise InvalidInput(f"{kind.value} {verb} a generation", field="generation")
    if not uid:
        return None
    name, _, number = uid.rpartition("/")
    if not number.isdecimal():
        raise InvalidInput(
            f"{uid!r} is not a generation", remedy="write NAME/NUMBER", field="generation"
        )
    found = generation_of(deployment_named(name), int(number))
    if not found.system:
        raise unbuilt(found, "cannot be described")
    return found


def _params(kind: TaskKind, params: Mapping[str, Any]) -> dict[str, Any]:
    """The params as the task's function reads them."""
    known = {"repo", "revision", "options"} if kind is TaskKind.HUB_SEARCH else set()
    if unknown := sorted(set(params) - known):
        raise InvalidInput(f"{kind.value} does not take {', '.join(unknown)}", field="params")
    if kind is not TaskKind.HUB_SEARCH:
        return {}
    repo = str(params.get("repo", "")).strip().removeprefix("https://huggingface.co/").strip("/")
    if not REPO.fullmatch(repo) or len(repo) > REPO_MAX:
        raise InvalidInput(f"{repo!r} is not a repository", remedy="write owner/name", field="repo")
    revision = str(params.get("revision") or "main")
    if not REVISION.fullmatch(revision):
        raise InvalidInput(
            f"{revision!r} is not a revision",
            remedy="write a branch, a tag or a commit",
            field="revision",
        )
    return {"repo": repo, "revision": revision, "options": params.get("options")}
