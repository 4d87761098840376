"""What people look at: every read of the panel, the API and `mm`.

Each query takes the person first, refuses those who may not look, and makes a number of database
queries that does not grow with the rows it returns.
"""

from deployments.queries.catalog import Entry, catalog
from deployments.queries.first_steps import Step, first_steps
from deployments.queries.gpus import GpuRow, gpus, gpus_of
from deployments.queries.history import (
    HistoryExport,
    HistoryRow,
    diff,
    differences,
    export_history,
    generation,
    generation_builds,
    history,
    live_spans,
    reports,
    said,
)
from deployments.queries.host_tasks import examinations, host_task, host_tasks
from deployments.queries.installation import (
    activity,
    alarms,
    audit,
    host,
    hosts,
    second_factor_roles,
    sessions,
    tokens,
    user,
    users,
)
from deployments.queries.jobs import (
    activation,
    activations,
    build,
    build_log,
    builds,
    warnings,
)
from deployments.queries.keys import key, key_events, key_owners, keys, revoked_by
from deployments.queries.measurements import MeasuredRow, measured
from deployments.queries.metrics import metrics
from deployments.queries.overview import (
    DeploymentRow,
    deployment,
    deployment_names,
    deployments_overview,
    measured_memory,
)
from deployments.queries.paging import Page, reports_of, require
from deployments.queries.policy import RuleRow, decision, exception, policy, requests
from deployments.queries.preview import ActivationPreview, preview
from deployments.queries.trials import trial, trials, trials_just_failed, tryable
from deployments.queries.usage_records import (
    By,
    budgets,
    request,
    usage,
    usage_csv,
    usage_events,
)

__all__ = [
    "ActivationPreview",
    "By",
    "DeploymentRow",
    "Entry",
    "GpuRow",
    "HistoryExport",
    "HistoryRow",
    "MeasuredRow",
    "Page",
    "RuleRow",
    "Step",
    "activation",
    "activations",
    "activity",
    "alarms",
    "audit",
    "budgets",
    "build",
    "build_log",
    "builds",
    "catalog",
    "decision",
    "deployment",
    "deployment_names",
    "deployments_overview",
    "diff",
    "differences",
    "examinations",
    "exception",
    "export_history",
    "first_steps",
    "generation",
    "generation_builds",
    "gpus",
    "gpus_of",
    "history",
    "host",
    "host_task",
    "host_tasks",
    "hosts",
    "key",
    "key_events",
    "key_owners",
    "keys",
    "live_spans",
    "measured",
    "measured_memory",
    "metrics",
    "policy",
    "preview",
    "reports",
    "reports_of",
    "request",
    "requests",
    "require",
    "revoked_by",
    "said",
    "second_factor_roles",
    "sessions",
    "tokens",
    "trial",
    "trials",
    "trials_just_failed",
    "tryable",
    "usage",
    "usage_csv",
    "usage_events",
    "user",
    "users",
    "warnings",
]
