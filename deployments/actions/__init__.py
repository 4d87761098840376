"""What people ask for: every write of the panel, the API and `mm`.

Each action checks the person's role, writes its rows and one `AuditEvent` in one transaction, and
after the commit hands jobs to the workers, tells the gate, and tells open pages. Every refusal is
an `MmError`. Permission checks live here (and in `queries`), so that page, API and
command line cannot differ.
"""

from deployments.actions.deploying import (
    cancel_build,
    deploy,
    import_generation,
    plan,
    rebuild,
    retry_build,
)
from deployments.actions.host_tasks import cancel_task, search_hub, start_task
from deployments.actions.keys import (
    edit_key,
    issue_key,
    playground_key,
    revoke_key,
    rotate_key,
    suspend_key,
)
from deployments.actions.people import (
    TOKEN_LASTS,
    arrive,
    close_first_steps,
    create_user,
    edit_user,
    end_other_sessions,
    end_session,
    issue_token,
    logged_in,
    logged_out,
    revoke_token,
    scopes_for,
    set_password,
    set_role,
    set_user_active,
    token_user,
)
from deployments.actions.permissions import acting_from, require
from deployments.actions.policy import (
    answer_request,
    remove_rule,
    remove_source_secret,
    request_exception,
    set_rule,
    set_source_secret,
)
from deployments.actions.retention import archive, configure, mark, pin
from deployments.actions.second_factor import (
    enrol_second_factor,
    renew_recovery_codes,
    require_second_factor,
    reset_second_factor,
    second_factor_fits,
    second_factor_key,
    second_factor_required,
)
from deployments.actions.serving import activate, cancel_activation, rollback, stop
from deployments.actions.trials import begin_trial, end_trial

__all__ = [
    "TOKEN_LASTS",
    "acting_from",
    "activate",
    "answer_request",
    "archive",
    "arrive",
    "begin_trial",
    "cancel_activation",
    "cancel_build",
    "cancel_task",
    "close_first_steps",
    "configure",
    "create_user",
    "deploy",
    "edit_key",
    "edit_user",
    "end_other_sessions",
    "end_session",
    "end_trial",
    "enrol_second_factor",
    "import_generation",
    "issue_key",
    "issue_token",
    "logged_in",
    "logged_out",
    "mark",
    "pin",
    "plan",
    "playground_key",
    "rebuild",
    "remove_rule",
    "remove_source_secret",
    "renew_recovery_codes",
    "request_exception",
    "require",
    "require_second_factor",
    "reset_second_factor",
    "retry_build",
    "revoke_key",
    "revoke_token",
    "rollback",
    "rotate_key",
    "scopes_for",
    "search_hub",
    "second_factor_fits",
    "second_factor_key",
    "second_factor_required",
    "set_password",
    "set_role",
    "set_rule",
    "set_source_secret",
    "set_user_active",
    "start_task",
    "stop",
    "suspend_key",
    "token_user",
]
