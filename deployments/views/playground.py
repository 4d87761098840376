"""The playground: a chat through the real gate, with a short-lived key of the person's own.

The browser talks to the panel, and the panel relays to the gate byte by byte: limits, usage and
history see it as any other client. The key stays in this process's memory and is never sent to
the browser. Who closes the page ends the request, at the engine too.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.text import Truncator

from deployments import actions, queries
from deployments.models import Generation, User
from deployments.panel.admission import let_go
from deployments.panel.forms import BeginTrial
from deployments.views.page import attempt, blame, form_only, operator, page, person, show
from mmadmin.core.errors import HTTP_STATUS, MmError

RENEW_S = 300
"""A key that ends sooner than this is replaced before it is used."""
TIMEOUT = httpx2.Timeout(connect=5, read=None, write=60, pool=5)
REASON_SHOWN = 80
"""Characters of a generation's reason in a choice."""
PASSED_ON = ("content-type", "x-mm-generation", "x-request-id", "retry-after")


@dataclass(frozen=True, slots=True)
class Held:
    """A key that is kept for a person."""

    text: str
    until: float
    """Unix seconds."""


_held: dict[int, Held] = {}


@page
def playground(request: HttpRequest) -> HttpResponse:
    """The page; `beside` names a deployment whose live generation and trial are to be compared."""
    me = person(request)
    rows = [row for row in queries.deployments_overview(me) if row.live]
    context = {
        "nav": "playground",
        "rows": rows,
        "failed": queries.trials_just_failed(me),
        "beside": request.GET.get("beside", ""),
    }
    parts = {"trials": "playground/_trials.html"}
    return show(request, "playground/page.html", context, parts=parts)


@page
def begin_trial(request: HttpRequest) -> HttpResponse:
    """Ask which generation to try beside the live one; then start it and go where it is asked."""
    me = operator(request)
    found = queries.tryable(me)
    choices = [
        (name, [(row.uid, _told(row)) for row in generations])
        for name, generations in found.items()
    ]
    initial = {"which": request.GET.get("which", "")}
    form = BeginTrial(request.POST or None, choices=choices, initial=initial)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            name, _, number = form.cleaned_data["which"].rpartition("/")
            try:
                actions.begin_trial(
                    me,
                    name,
                    int(number),
                    minutes=form.cleaned_data["minutes"],
                    reason=form.cleaned_data["reason"],
                )
            except MmError as error:
                blame(form, error)
            else:
                return redirect(f"{reverse('playground')}?{urlencode({'beside': name})}")
        status = 422
    context = {"nav": "playground", "form": form, "any": bool(found)}
    return show(request, "playground/trial.html", context, status=status)


def _told(generation: Generation) -> str:
    """A generation as a choice."""
    reason = Truncator(generation.reason).chars(REASON_SHOWN)
    return f"{generation.uid}: {reason}" if reason else generation.uid


@form_only
@page
def end_trial(request: HttpRequest, trial_id: int) -> HttpResponse:
    """End a trial before its time."""
    me = person(request)
    if request.headers.get("HX-Request"):  # the page stays as it is, and hears of the end
        actions.end_trial(me, trial_id)
        return HttpResponse(status=204)
    it = queries.trial(me, trial_id)
    back = {"name": it.deployment.name, "number": it.generation.number}
    return attempt(
        request,
        lambda: actions.end_trial(me, trial_id),
        f"The trial of {it.generation.uid} is ending.",
        reverse("generation", kwargs=back),
    )


async def chat(request: HttpRequest) -> HttpResponseBase:
    """Relay one chat completion to the gate."""
    user = await request.auser()
    if not isinstance(user, User) or not user.is_active:
        return _failure(401, "you are logged out", "log in again in another tab")
    if request.method != "POST":
        return HttpResponse(status=405)
    try:
        body = request.body
    except RequestDataTooBig:
        return _failure(413, "this conversation is too long for the playground", "start a new chat")
    try:
        answer = await _ask(request, user, body)
        if answer.status_code == 401:  # noqa: PLR2004 (somebody has ended the key meanwhile)
            _held.pop(user.pk, None)
            answer = await _ask(request, user, body)
    except MmError as error:
        return _failure(HTTP_STATUS.get(error.code, 400), error.message, error.remedy)
    return answer


async def _ask(request: HttpRequest, user: User, body: bytes) -> HttpResponseBase:
    """What the gate answers to the person's key. Raises what a new key is refused with."""
    key = await sync_to_async(_key_of)(user)
    await let_go(request)  # the engine may take minutes
    return await _relay(body, key, request.META.get("HTTP_USER_AGENT", ""))


def _key_of(user: User) -> str:
    """The person's key: the one in memory, else a new one."""
    held = _held.get(user.pk)
    if held is None or held.until < time.time() + RENEW_S:
        key, text = actions.playground_key(user)
        until = key.expires_at.timestamp() if key.expires_at else time.time() + RENEW_S
        held = _held[user.pk] = Held(text, until)
    return held.text


async def _relay(body: bytes, key: str, agent: str) -> HttpResponseBase:
    client = httpx2.AsyncClient(base_url=settings.GATE_URL, timeout=TIMEOUT, trust_env=False)
    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "user-agent": f"mmadmin-playground {agent}",
    }
    try:
        request = client.build_request(
            "POST", "/v1/chat/completions", content=body, headers=headers
        )
        answer = await client.send(request, stream=True)
    except httpx2.HTTPError:
        await client.aclose()
        return _failure(503, "the gate does not answer", "check `mm status`")
    relayed = StreamingHttpResponse(_bytes(client, answer), status=answer.status_code)
    for name in PASSED_ON:
        if name in answer.headers:
            relayed[name] = answer.headers[name]
    relayed["Cache-Control"] = "no-store"
    relayed["X-Accel-Buffering"] = "no"
    return relayed


async def _bytes(client: httpx2.AsyncClient, answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The gate's bytes as they come; closing this closes the gate's side."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx2.HTTPError:
        error = {"message": "the gate ended the answer", "type": "server_error"}
        yield f"data: {json.dumps({'error': error})}\n\n".encode()
    finally:
        await answer.aclose()
        await client.aclose()


def _failure(status: int, message: str, remedy: str) -> JsonResponse:
    """An error in the shape that the gate's own errors have."""
    text = f"{message}: {remedy}" if remedy else message
    return JsonResponse({"error": {"message": text, "type": "playground"}}, status=status)
