"""The REST API under `/api/v1`: what the panel and `mm` do, for programs.

Every endpoint is one action or query; roles are checked there. A request proves who asks by the
panel's session (with its CSRF token) or by a personal token (`Authorization: Bearer pat-mm-…`),
whose scopes limit it further. Every error has one shape,
`{"error": {code, message, remedy, details}}`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Annotated, Any, Literal, cast

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import RequestDataTooBig
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI, Router, Status
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.params.functions import Query
from ninja.security import HttpBearer, SessionAuth

from deployments import actions, queries
from deployments import schemas as s
from deployments.accounts import rates
from deployments.accounts.passwords import confirm
from deployments.models import User
from deployments.queries import storage
from deployments.queries.engine_log import engine_log
from mmadmin.core.errors import HTTP_STATUS, InvalidInput, MmError, NotFound, TooMany
from mmadmin.core.spec.json_schema import json_schema

log = logging.getLogger(__name__)


class Token(HttpBearer):
    """A personal token."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:  # noqa: ARG002
        """The token's person, or None. Raises `TooMany`."""
        user = actions.token_user(token)
        if user is not None:
            rates.api_requests.take(token)
        return user


class Session(SessionAuth):
    """The panel's session."""

    def __call__(self, request: HttpRequest) -> User | None:
        """The person; without a session nobody asks, so CSRF does not apply."""
        return super().__call__(request) if self.param_name in request.COOKIES else None

    def authenticate(self, request: HttpRequest, key: str | None) -> User | None:  # noqa: ARG002
        """The person who is logged in, or None."""
        return request.user if isinstance(request.user, User) else None


def for_users(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """The schema and its page, for whoever may log in."""

    @wraps(view)
    def shown(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            if request.user.is_authenticated or Token()(request):
                return view(request, *args, **kwargs)
        except TooMany as error:
            return _mm_error(request, error)
        if request.path.endswith(".json"):
            return _unauthenticated(request, AuthenticationError())
        return redirect_to_login(request.get_full_path())

    return shown


api = NinjaAPI(
    title="mmadmin",
    version="1",
    description=__doc__ or "",
    urls_namespace="api-1",
    auth=[Token(), Session(csrf=True)],
    docs_decorator=for_users,
)
ERRORS = {frozenset({401, 403, 404, 409, 422, 429, 400, 503}): s.ErrorOut}


def who(request: HttpRequest) -> User:
    """The person who asks."""
    return cast("User", cast("Any", request).auth)


def failure(
    request: HttpRequest, status: int, code: str, message: str, **more: Any
) -> HttpResponse:
    """An error in the one shape."""
    body = {"code": code, "message": message, "remedy": "", "details": {}} | more
    return api.create_response(request, {"error": body}, status=status)


@api.exception_handler(MmError)
def _mm_error(request: HttpRequest, error: MmError) -> HttpResponse:
    status = HTTP_STATUS.get(error.code, 400)
    answer = api.create_response(request, {"error": error.as_json()}, status=status)
    if isinstance(error, TooMany):
        answer["Retry-After"] = str(error.details["retry_after_s"])
    return answer


def _field(loc: Sequence[str | int]) -> str:
    """The field as the client named it, without the parts of our own parameters."""
    parts = loc[2:] if loc[0] == "body" and len(loc) > 2 else loc[1:]  # noqa: PLR2004
    return ".".join(map(str, parts))


def _message(problem: Mapping[str, Any]) -> str:
    """What is wrong, in our own words where the validator has its own."""
    if problem["type"] == "extra_forbidden":
        return "there is no such field"
    return str(problem["msg"]).removeprefix("Value error, ")


@api.exception_handler(ValidationError)
def _invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    problems = [
        {"field": _field(problem["loc"]), "message": _message(problem)} for problem in error.errors
    ]
    message = "; ".join(f"{p['field']}: {p['message']}" for p in problems) or "invalid input"
    return failure(request, 422, "invalid_input", message, details={"problems": problems})


@api.exception_handler(AuthenticationError)
def _unauthenticated(request: HttpRequest, error: AuthenticationError) -> HttpResponse:  # noqa: ARG001
    return failure(
        request, 401, "unauthenticated", "who is asking?", remedy="log in, or send a personal token"
    )


@api.exception_handler(HttpError)
def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    code = "refused" if error.status_code == 403 else "invalid_input"  # noqa: PLR2004
    return failure(request, error.status_code, code, str(error))


@api.exception_handler(RequestDataTooBig)
def _too_big(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:  # noqa: ARG001
    return failure(
        request,
        413,
        "invalid_input",
        f"the body is larger than {settings.DATA_UPLOAD_MAX_MEMORY_SIZE} bytes",
        remedy="deployment files and notes are small: send less",
    )


@api.exception_handler(OperationalError)
def _no_database(request: HttpRequest, error: OperationalError) -> HttpResponse:
    log.warning("%s %s: the database: %s", request.method, request.path, error)
    return failure(
        request, 503, "unreachable", "the database does not answer", remedy="try again in a moment"
    )


@api.exception_handler(Http404)
def _missing(request: HttpRequest, error: Http404) -> HttpResponse:
    return failure(request, 404, "not_found", str(error) or "there is nothing here")


@api.exception_handler(Exception)
def _bug(request: HttpRequest, error: Exception) -> HttpResponse:
    log.error("%s %s", request.method, request.path, exc_info=error)
    return failure(
        request,
        500,
        "errored",
        "an error in mmadmin itself",
        remedy="see the panel's log for the traceback, and report it",
    )


deployments = Router(tags=["deployments"])
builds = Router(tags=["builds"])
activations = Router(tags=["activations"])
trials = Router(tags=["trials"])
keys = Router(tags=["keys"])
people = Router(tags=["people"])
rest = Router(tags=["installation"])


# --- deployments


@deployments.get("", response={200: list[s.DeploymentOut], **ERRORS})
def list_deployments(request: HttpRequest, archived: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Every deployment, with what is live."""
    rows = queries.deployments_overview(who(request), archived=archived)
    return [s.DeploymentOut.of(row) for row in rows]


@deployments.post("", response={201: s.GenerationOut, **ERRORS})
def deploy(request: HttpRequest, body: s.DeployIn) -> Any:
    """Record the next generation of the deployment that the file names, and build it."""
    generation = actions.deploy(
        who(request), body.spec_toml, reason=body.reason, activate=body.activate
    )
    return Status(201, generation)


@deployments.get("/{name}", response={200: s.DeploymentOut, **ERRORS})
def get_deployment(request: HttpRequest, name: str) -> Any:
    """One deployment."""
    return s.DeploymentOut.of(queries.deployment(who(request), name))


@deployments.patch("/{name}", response={200: s.DeploymentOut, **ERRORS})
def configure(request: HttpRequest, name: str, body: s.ConfigureIn) -> Any:
    """Change what is not part of a generation."""
    actions.configure(who(request), name, **body.dict(exclude_unset=True))
    return s.DeploymentOut.of(queries.deployment(who(request), name))


@deployments.get("/{name}/history", response={200: s.PageOut[s.HistoryOut], **ERRORS})
def history(request: HttpRequest, name: str, page: int = Query(1, ge=1)) -> Any:
    """Its generations, newest first."""
    return _page(queries.history(who(request), name, page=page), s.HistoryOut.of_row)


@deployments.get(
    "/{name}/generations/{int:number}", response={200: s.GenerationDetailOut, **ERRORS}
)
def generation(request: HttpRequest, name: str, number: int) -> Any:
    """One generation with everything that was recorded of it."""
    return _generation(request, name, number)


@deployments.get(
    "/{name}/generations/{int:number}/reports/{kind}", response={200: s.ReportOut, **ERRORS}
)
def report(request: HttpRequest, name: str, number: int, kind: str) -> Any:
    """One report of a generation: its probes, its template, what its model says, and so on."""
    found = queries.reports(who(request), queries.generation(who(request), name, number).generation)
    if kind not in found:
        raise NotFound(f"{name}/{number} has no report {kind}", remedy=f"it has {', '.join(found)}")
    return found[kind]


@deployments.get("/{name}/generations/{int:number}/log", response={200: s.EngineLogOut, **ERRORS})
def generation_log(
    request: HttpRequest, name: str, number: int, lines: int = Query(300, ge=1, le=1000)
) -> Any:
    """The end of its newest engine's own log, where that ran on the panel's host."""
    return s.EngineLogOut.of(engine_log(who(request), name, number, lines=lines))


@deployments.get("/{name}/measured", response={200: s.PageOut[s.MeasuredOut], **ERRORS})
def list_measured(request: HttpRequest, name: str, page: int = Query(1, ge=1)) -> Any:
    """Its probed generations, newest first: speed and memory as measured, and what clients had."""
    return _page(queries.measured(who(request), name, page=page), s.MeasuredOut.of)


@deployments.get("/{name}/export", response={200: dict[str, Any], **ERRORS})
def export_history(request: HttpRequest, name: str) -> Any:
    """Its whole history as one document: deployment files, locks, graphs, reports, who and when."""
    return s.history_document(queries.export_history(who(request), name))


@deployments.get("/{name}/diff", response={200: list[s.DiffRowOut], **ERRORS})
def diff(
    request: HttpRequest,
    name: str,
    a: int = Query(..., ge=0, le=2**31 - 1),
    b: int = Query(..., ge=0, le=2**31 - 1),
) -> Any:
    """What differs from generation `a` to generation `b`."""
    return [s.DiffRowOut.of(row) for row in queries.diff(who(request), name, a, b)]


@deployments.get("/{name}/preview", response={200: s.PreviewOut, **ERRORS})
def preview(
    request: HttpRequest, name: str, to: int | None = Query(None, ge=1, le=2**31 - 1)
) -> Any:
    """What activating generation `to` would do, or (left out) a roll-back; changes nothing."""
    return s.PreviewOut.of(queries.preview(who(request), name, to))


@deployments.post("/{name}/activate", response={202: s.ActivationOut, **ERRORS})
def activate(request: HttpRequest, name: str, body: s.ActivateIn) -> Any:
    """Make a built generation live."""
    return Status(
        202,
        actions.activate(who(request), name, body.number, reason=body.reason),
    )


@deployments.post("/{name}/rollback", response={202: s.ActivationOut, **ERRORS})
def rollback(request: HttpRequest, name: str, body: s.RollbackIn) -> Any:
    """Bring an earlier generation back."""
    return Status(
        202,
        actions.rollback(who(request), name, to=body.to, reason=body.reason),
    )


@deployments.post("/{name}/stop", response={202: s.ActivationOut, **ERRORS})
def stop(request: HttpRequest, name: str, body: s.ReasonIn) -> Any:
    """Take the live generation down."""
    return Status(202, actions.stop(who(request), name, reason=body.reason))


@deployments.post("/{name}/archive", response={200: s.DeploymentOut, **ERRORS})
def archive(request: HttpRequest, name: str, body: s.SwitchIn) -> Any:
    """Put a deployment that serves nothing out of sight, or take it back."""
    actions.archive(who(request), name, on=body.on)
    return s.DeploymentOut.of(queries.deployment(who(request), name))


@deployments.post(
    "/{name}/generations/{int:number}/pin", response={200: s.GenerationDetailOut, **ERRORS}
)
def pin(request: HttpRequest, name: str, number: int, body: s.PinIn) -> Any:
    """Keep a generation's objects whatever its age, or no longer."""
    actions.pin(who(request), name, number, body.on, reason=body.reason)
    return _generation(request, name, number)


@deployments.post(
    "/{name}/generations/{int:number}/mark", response={200: s.GenerationDetailOut, **ERRORS}
)
def mark(request: HttpRequest, name: str, number: int, body: s.MarkIn) -> Any:
    """Call a generation good or bad, or neither."""
    actions.mark(who(request), name, number, body.mark, reason=body.reason)
    return _generation(request, name, number)


@deployments.post("/{name}/generations/{int:number}/trial", response={202: s.TrialOut, **ERRORS})
def begin_trial(request: HttpRequest, name: str, number: int, body: s.TrialIn) -> Any:
    """Run a kept generation beside the live one for a limited time; look at the trial for more."""
    trial = actions.begin_trial(
        who(request), name, number, minutes=body.minutes, reason=body.reason
    )
    return Status(202, queries.trial(who(request), trial.pk))


@deployments.post("/{name}/generations/{int:number}/rebuild", response={202: s.BuildOut, **ERRORS})
def rebuild(request: HttpRequest, name: str, number: int) -> Any:
    """Make a generation's objects again from its own record, to the same hashes."""
    build = actions.rebuild(who(request), name, number)
    return Status(202, queries.build(who(request), build.pk))


# --- builds and activations


@builds.post("/plans", response={202: s.BuildOut, **ERRORS})
def plan(request: HttpRequest, body: s.SpecIn) -> Any:
    """Ask what a deploy of this file would build and fetch; look at the build for the answer."""
    build = actions.plan(who(request), body.spec_toml)
    return Status(202, queries.build(who(request), build.pk))


@builds.get("/builds", response={200: s.PageOut[s.BuildBrief], **ERRORS})
def list_builds(request: HttpRequest, deployment: str = "", page: int = Query(1, ge=1)) -> Any:
    """Builds, newest first."""
    return _page(queries.builds(who(request), name=deployment, page=page))


@builds.get("/builds/{int:build_id}", response={200: s.BuildOut, **ERRORS})
def get_build(request: HttpRequest, build_id: int) -> Any:
    """One build with its steps."""
    return queries.build(who(request), build_id)


@builds.get("/builds/{int:build_id}/log", response={200: list[s.LogOut], **ERRORS})
def build_log(
    request: HttpRequest,
    build_id: int,
    after: int = Query(0, ge=0, le=s.MAX_ID),
    step: int = Query(0, ge=0, le=s.MAX_ID),
) -> Any:
    """A build's log after chunk `after`, oldest first; of one step, or of all."""
    queries.build(who(request), build_id)
    which = {"step_id": step} if step else {"build_id": build_id}
    return queries.build_log(who(request), after_id=after, **which)


@builds.post("/builds/{int:build_id}/cancel", response={202: s.BuildOut, **ERRORS})
def cancel_build(request: HttpRequest, build_id: int) -> Any:
    """Cancel a build."""
    actions.cancel_build(who(request), build_id)
    return Status(202, queries.build(who(request), build_id))


@builds.post("/builds/{int:build_id}/retry", response={202: s.BuildOut, **ERRORS})
def retry_build(request: HttpRequest, build_id: int) -> Any:
    """Build a failed generation again; answers with the new build."""
    again = actions.retry_build(who(request), build_id)
    return Status(202, queries.build(who(request), again.pk))


@activations.get("", response={200: s.PageOut[s.ActivationOut], **ERRORS})
def list_activations(request: HttpRequest, deployment: str = "", page: int = Query(1, ge=1)) -> Any:
    """Activations, newest first."""
    return _page(queries.activations(who(request), name=deployment, page=page))


@activations.get("/{int:activation_id}", response={200: s.ActivationOut, **ERRORS})
def get_activation(request: HttpRequest, activation_id: int) -> Any:
    """One activation."""
    return queries.activation(who(request), activation_id)


@activations.get("/{int:activation_id}/log", response={200: list[s.LogOut], **ERRORS})
def activation_log(
    request: HttpRequest, activation_id: int, after: int = Query(0, ge=0, le=s.MAX_ID)
) -> Any:
    """An activation's log after chunk `after`, oldest first."""
    queries.activation(who(request), activation_id)
    return queries.build_log(who(request), activation_id=activation_id, after_id=after)


@activations.post("/{int:activation_id}/cancel", response={202: s.ActivationOut, **ERRORS})
def cancel_activation(request: HttpRequest, activation_id: int) -> Any:
    """Cancel an activation; what was live before stays or comes back."""
    actions.cancel_activation(who(request), activation_id)
    return Status(202, queries.activation(who(request), activation_id))


@trials.get("", response={200: s.PageOut[s.TrialOut], **ERRORS})
def list_trials(request: HttpRequest, deployment: str = "", page: int = Query(1, ge=1)) -> Any:
    """Trials, newest first."""
    return _page(queries.trials(who(request), name=deployment, page=page))


@trials.get("/{int:trial_id}", response={200: s.TrialOut, **ERRORS})
def get_trial(request: HttpRequest, trial_id: int) -> Any:
    """One trial: whether it answers, and until when."""
    return queries.trial(who(request), trial_id)


@trials.post("/{int:trial_id}/end", response={202: s.TrialOut, **ERRORS})
def end_trial(request: HttpRequest, trial_id: int) -> Any:
    """End a trial before its time."""
    actions.end_trial(who(request), trial_id)
    return Status(202, queries.trial(who(request), trial_id))


# --- keys


@keys.get("", response={200: s.PageOut[s.KeyOut], **ERRORS})
def list_keys(
    request: HttpRequest,
    search: str = "",
    state: Literal["", "active", "suspended", "expired", "revoked"] = "",
    page: int = Query(1, ge=1),
) -> Any:
    """Client keys, newest first."""
    found = queries.keys(who(request), search=search, state=state, page=page)
    spent = queries.budgets(who(request), [row.key_id for row in found.rows])
    return _page(found, lambda row: s.KeyOut.of(row, spent[row.key_id]))


@keys.post("", response={201: s.NewKeyOut, **ERRORS})
def issue_key(request: HttpRequest, body: s.KeyIn) -> Any:
    """Issue a key. Its text is in this answer, and nowhere afterwards."""
    return Status(201, s.NewKeyOut.of_new(*actions.issue_key(who(request), **body.dict())))


@keys.get("/{key_id}", response={200: s.KeyOut, **ERRORS})
def get_key(request: HttpRequest, key_id: str) -> Any:
    """One key."""
    return _key(request, key_id)


@keys.get("/{key_id}/events", response={200: list[s.AuditOut], **ERRORS})
def key_events(request: HttpRequest, key_id: str) -> Any:
    """Who did what to a key."""
    queries.key(who(request), key_id)
    return queries.key_events(who(request), key_id)


@keys.patch("/{key_id}", response={200: s.KeyOut, **ERRORS})
def edit_key(request: HttpRequest, key_id: str, body: s.KeyEditIn) -> Any:
    """Change a key's owner, note, rights or limits."""
    actions.edit_key(who(request), key_id, **body.dict(exclude_unset=True))
    return _key(request, key_id)


@keys.post("/{key_id}/revoke", response={200: s.KeyOut, **ERRORS})
def revoke_key(request: HttpRequest, key_id: str) -> Any:
    """Revoke a key permanently."""
    actions.revoke_key(who(request), key_id)
    return _key(request, key_id)


@keys.post("/{key_id}/suspend", response={200: s.KeyOut, **ERRORS})
def suspend_key(request: HttpRequest, key_id: str, body: s.SwitchIn) -> Any:
    """Suspend a key, or let it work again."""
    actions.suspend_key(who(request), key_id, body.on)
    return _key(request, key_id)


@keys.post("/{key_id}/rotate", response={201: s.NewKeyOut, **ERRORS})
def rotate_key(request: HttpRequest, key_id: str, body: s.RotateIn) -> Any:
    """Issue a successor with the same rights; the old key ends after the overlap."""
    overlap = timedelta(seconds=body.overlap_s)
    return Status(
        201, s.NewKeyOut.of_new(*actions.rotate_key(who(request), key_id, overlap=overlap))
    )


def _generation(request: HttpRequest, name: str, number: int) -> s.GenerationDetailOut:
    row = queries.generation(who(request), name, number)
    reports = queries.reports(who(request), row.generation)
    return s.GenerationDetailOut.of_detail(row, reports.values())


def _key(request: HttpRequest, key_id: str) -> s.KeyOut:
    row = queries.key(who(request), key_id)
    return s.KeyOut.of(row, queries.budgets(who(request), [key_id])[key_id])


# --- people


@people.get("/me", response={200: s.UserOut, **ERRORS})
def me(request: HttpRequest) -> Any:
    """Who asks."""
    return s.UserOut.of(who(request))


@people.get("/users", response={200: s.PageOut[s.UserOut], **ERRORS})
def users(request: HttpRequest, search: str = "", page: int = Query(1, ge=1)) -> Any:
    """The people, by name."""
    return _page(queries.users(who(request), search=search, page=page), s.UserOut.of)


@people.post("/users", response={201: s.UserOut, **ERRORS})
def create_user(request: HttpRequest, body: s.UserIn) -> Any:
    """Add a person."""
    return Status(201, s.UserOut.of(actions.create_user(who(request), **body.dict())))


@people.patch("/users/{username}", response={200: s.UserOut, **ERRORS})
def edit_user(request: HttpRequest, username: str, body: s.UserEditIn) -> Any:
    """Change a person's role or password, or let them in or keep them out.

    For one's own password, send `current_password` too, unless the login is a few minutes old.
    """
    if body.password is not None and username == who(request).get_username():
        confirm(request, who(request), body.current_password)
    user = actions.edit_user(
        who(request), username, role=body.role, active=body.active, password=body.password
    )
    return s.UserOut.of(user)


@people.get("/tokens", response={200: s.PageOut[s.TokenOut], **ERRORS})
def list_tokens(request: HttpRequest, page: int = Query(1, ge=1)) -> Any:
    """One's own personal tokens, newest first."""
    return _page(queries.tokens(who(request), page=page), s.TokenOut.of)


@people.post("/tokens", response={201: s.NewTokenOut, **ERRORS})
def issue_token(request: HttpRequest, body: s.TokenIn) -> Any:
    """Make a personal token. Its text is in this answer, and nowhere afterwards.

    Send `current_password` too, unless the login is a few minutes old.
    """
    confirm(request, who(request), body.current_password)
    wanted = body.dict(exclude={"current_password"})
    if "expires_at" not in body.model_fields_set:
        wanted["expires_at"] = timezone.now() + actions.TOKEN_LASTS
    return Status(201, s.NewTokenOut.of_new(*actions.issue_token(who(request), **wanted)))


@people.post("/tokens/{token_id}/revoke", response={200: s.TokenOut, **ERRORS})
def revoke_token(request: HttpRequest, token_id: str) -> Any:
    """End a personal token."""
    return s.TokenOut.of(actions.revoke_token(who(request), token_id))


@people.get("/sessions", response={200: s.PageOut[s.SessionOut], **ERRORS})
def list_sessions(request: HttpRequest, page: int = Query(1, ge=1)) -> Any:
    """One's own logins in browsers that have not ended, newest first."""
    present = _present(request)
    found = queries.sessions(who(request), page=page)
    return _page(found, lambda row: s.SessionOut.of(row, present=present))


@people.post("/sessions/end-others", response={200: s.EndedOut, **ERRORS})
def end_other_sessions(request: HttpRequest) -> Any:
    """End all of one's own logins but the one that asks; by token, all of them."""
    return s.EndedOut(ended=actions.end_other_sessions(who(request), _present(request)))


@people.post("/sessions/{session_id}/end", response={200: s.EndedOut, **ERRORS})
def end_session(request: HttpRequest, session_id: str) -> Any:
    """End one of one's own logins: whoever uses it must log in again."""
    actions.end_session(who(request), session_id)
    return s.EndedOut(ended=1)


def _present(request: HttpRequest) -> str:
    """The key of the login that asks; empty when a token does."""
    return request.session.session_key or ""


# --- the installation


@rest.get("/catalog", response={200: list[s.CatalogOut], **ERRORS})
def catalog(request: HttpRequest) -> Any:
    """Deployment files that come with mmadmin, to begin with."""
    return [
        s.CatalogOut(name=entry.slug, title=entry.title, about=entry.about, spec_toml=entry.text)
        for entry in queries.catalog(who(request))
    ]


@rest.get("/deployment-file.schema.json", response={200: dict[str, Any], **ERRORS}, auth=None)
def deployment_file_schema(request: HttpRequest) -> Any:  # noqa: ARG001
    """The deployment file as JSON Schema. Open to all: editors that ask for it cannot log in."""
    return json_schema()


@rest.get("/store", response={200: s.StoreOut, **ERRORS})
def store(request: HttpRequest) -> Any:
    """What lies in the store of the panel's own host, and what keeps it."""
    return s.StoreOut.of(storage.shelves(who(request)))


@rest.get("/hosts", response={200: list[s.HostOut], **ERRORS})
def hosts(request: HttpRequest) -> Any:
    """The hosts."""
    return queries.hosts(who(request))


@rest.get("/hosts/{name}/tasks", response={200: list[s.TaskOut], **ERRORS})
def list_tasks(request: HttpRequest, name: str) -> Any:
    """The newest task of each kind on a host, hub searches left out."""
    queries.host(who(request), name)
    return list(queries.host_tasks(who(request), host=name).values())


@rest.post("/hosts/{name}/tasks", response={202: s.TaskOut, **ERRORS})
def start_task(request: HttpRequest, name: str, body: s.TaskIn) -> Any:
    """Have a host's worker search the hub, collect or verify its store, or run the doctor."""
    return Status(202, actions.start_task(who(request), host=name, **body.dict()))


@rest.get("/tasks/{int:task_id}", response={200: s.TaskOut, **ERRORS})
def get_task(request: HttpRequest, task_id: int) -> Any:
    """How far it is, and what came of it."""
    return queries.host_task(who(request), task_id)


@rest.get("/tasks/{int:task_id}/log", response={200: list[s.LogOut], **ERRORS})
def task_log(request: HttpRequest, task_id: int, after: int = Query(0, ge=0, le=s.MAX_ID)) -> Any:
    """A task's log after chunk `after`, oldest first."""
    queries.host_task(who(request), task_id)
    return queries.build_log(who(request), task_id=task_id, after_id=after)


@rest.post("/tasks/{int:task_id}/cancel", response={202: s.TaskOut, **ERRORS})
def cancel_task(request: HttpRequest, task_id: int) -> Any:
    """Cancel it: at once when it waits, else at its worker's next step."""
    return Status(202, actions.cancel_task(who(request), task_id))


@rest.get("/alarms", response={200: list[s.AlarmOut], **ERRORS})
def alarms(request: HttpRequest, deployment: str = "") -> Any:
    """Open alarms."""
    return queries.alarms(who(request), name=deployment)


@rest.get(
    "/metrics",
    response=ERRORS,
    openapi_extra={
        "responses": {200: {"description": "OK", "content": {"text/plain": {"schema": {}}}}}
    },
)
def metrics(request: HttpRequest) -> HttpResponse:
    """Deployments, engines, alarms, jobs, hosts, GPUs and budgets of keys, for Prometheus."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return HttpResponse(queries.metrics(who(request)), content_type=kind)


@rest.get("/audit", response={200: s.PageOut[s.AuditOut], **ERRORS})
def audit(
    request: HttpRequest,
    search: str = "",
    verb: str = "",
    user: str = "",
    page: int = Query(1, ge=1),
) -> Any:
    """The audit log, newest first."""
    found = queries.audit(who(request), search=search, verb=verb, who=user, page=page)
    return _page(found)


@rest.get("/policy", response={200: list[s.RuleOut], **ERRORS})
def policy(request: HttpRequest) -> Any:
    """Which sources deployments may use: every rule that holds, by kind."""
    return [s.RuleOut.of(row.rule) for row in queries.policy(who(request))]


@rest.put("/policy", response={200: list[s.RuleOut], **ERRORS})
def set_rule(request: HttpRequest, body: s.RuleIn) -> Any:
    """Allow or deny a pattern; answers with every rule that holds."""
    actions.set_rule(who(request), body.kind, body.pattern, allow=body.allow, reason=body.reason)
    return policy(request)


@rest.post("/policy/remove", response={200: list[s.RuleOut], **ERRORS})
def remove_rule(request: HttpRequest, body: s.RuleNameIn) -> Any:
    """Take a rule back; answers with every rule that holds."""
    actions.remove_rule(who(request), body.kind, body.pattern)
    return policy(request)


@rest.get("/policy/decision", response={200: s.RuleOut, **ERRORS})
def policy_decision(request: HttpRequest, kind: str, subject: str) -> Any:
    """The rule that decides on a repository, package, host, path or digest."""
    return s.RuleOut.of(queries.decision(who(request), kind, subject))


@rest.get("/policy/requests", response={200: s.PageOut[s.ExceptionOut], **ERRORS})
def list_exceptions(request: HttpRequest, page: int = Query(1, ge=1)) -> Any:
    """Requests for exceptions, those that wait first: an admin's all, others' their own."""
    return _page(queries.requests(who(request), page=page))


@rest.post("/policy/requests", response={201: s.ExceptionOut, **ERRORS})
def request_exception(request: HttpRequest, body: s.ExceptionIn) -> Any:
    """Ask the admins to allow what the policy refuses."""
    asked = actions.request_exception(who(request), body.kind, body.pattern, reason=body.reason)
    return Status(201, asked)


@rest.post("/policy/requests/{int:request_id}/answer", response={200: s.ExceptionOut, **ERRORS})
def answer_exception(request: HttpRequest, request_id: int, body: s.AnswerIn) -> Any:
    """Grant a request, which becomes a rule, or refuse it with a reason."""
    return actions.answer_request(who(request), request_id, grant=body.grant, reason=body.reason)


@rest.get("/requests", response={200: s.PageOut[s.RequestOut], **ERRORS})
def list_requests(
    request: HttpRequest, key_id: str = "", deployment: str = "", page: int = Query(1, ge=1)
) -> Any:
    """Finished requests, newest first: of a key, of a deployment, or all."""
    found = queries.usage_events(who(request), key_id=key_id, deployment=deployment, page=page)
    return _page(found)


@rest.get("/requests/{request_id}", response={200: s.RequestOut, **ERRORS})
def get_request(request: HttpRequest, request_id: str) -> Any:
    """One finished request by its id: which generation answered it, and how."""
    return queries.request(who(request), request_id)


def _usage(request: HttpRequest, wanted: s.UsageIn) -> list[dict[str, Any]]:
    until = wanted.until or timezone.now()
    try:
        since = wanted.since or until - timedelta(days=7)
    except OverflowError as error:
        raise InvalidInput(f"there is no week before {until.isoformat()}") from error
    return queries.usage(who(request), **wanted.dict() | {"since": since, "until": until})


@rest.get("/usage", response={200: list[s.UsageOut], **ERRORS})
def usage(request: HttpRequest, wanted: Annotated[s.UsageIn, Query()]) -> Any:
    """Sums of the usage records from `since` (else a week before) to `until` (else now)."""
    return _usage(request, wanted)


@rest.get(
    "/usage.csv",
    response=ERRORS,
    openapi_extra={
        "responses": {200: {"description": "OK", "content": {"text/csv": {"schema": {}}}}}
    },
)
def usage_csv(request: HttpRequest, wanted: Annotated[s.UsageIn, Query()]) -> HttpResponse:
    """The same sums as CSV."""
    text = queries.usage_csv(_usage(request, wanted), wanted.by)
    return HttpResponse(text, content_type="text/csv; charset=utf-8")


def _page(found: queries.Page[Any], convert: Any = None) -> dict[str, Any]:
    """A page; its rows are read by their schema, or converted first."""
    return {
        "rows": [convert(row) for row in found.rows] if convert else found.rows,
        "page": found.page,
        "pages": found.pages,
        "total": found.total,
        "per_page": found.per_page,
    }


api.add_router("/deployments", deployments)
api.add_router("", builds)
api.add_router("/activations", activations)
api.add_router("/trials", trials)
api.add_router("/keys", keys)
api.add_router("", people)
api.add_router("", rest)


@csrf_exempt
def missing(request: HttpRequest, rest: str) -> HttpResponse:
    """An address of the API that does not exist: in the API's own shape."""
    return failure(
        request, 404, "not_found", f"there is nothing at {rest}", remedy="see /api/v1/docs"
    )
