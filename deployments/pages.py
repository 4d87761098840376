"""The addresses of the pages."""

from __future__ import annotations

from django.urls import path

from deployments.views import audit, builds, deployments, editing, keys, overview, session, stream

urlpatterns = [
    path("login/", session.login, name="login"),
    path("logout/", session.logout, name="logout"),
    path("", overview.overview, name="overview"),
    path("events/", stream.stream, name="events"),
    path("deployments/new/", editing.new, name="new-deployment"),
    path("deployments/<str:name>/", deployments.deployment, name="deployment"),
    path("deployments/<str:name>/edit/", editing.new, name="edit-deployment"),
    path("deployments/<str:name>/compare/", deployments.compare, name="compare"),
    path("deployments/<str:name>/rollback/", deployments.rollback_to_last, name="rollback-last"),
    path("deployments/<str:name>/stop/", deployments.stop, name="stop"),
    path("deployments/<str:name>/archive/", deployments.archive, name="archive"),
    path(
        "deployments/<str:name>/generations/<int:number>/",
        deployments.generation,
        name="generation",
    ),
    path(
        "deployments/<str:name>/generations/<int:number>/activate/",
        deployments.activate,
        name="activate",
    ),
    path(
        "deployments/<str:name>/generations/<int:number>/rollback/",
        deployments.rollback,
        name="rollback",
    ),
    path("deployments/<str:name>/generations/<int:number>/pin/", deployments.pin, name="pin"),
    path("deployments/<str:name>/generations/<int:number>/mark/", deployments.mark, name="mark"),
    path("activations/<int:activation_id>/", deployments.activation, name="activation"),
    path(
        "activations/<int:activation_id>/cancel/",
        deployments.cancel_activation,
        name="cancel-activation",
    ),
    path("builds/", builds.builds, name="builds"),
    path("builds/<int:build_id>/", builds.build, name="build"),
    path("builds/<int:build_id>/log/", builds.log, name="build-log"),
    path("builds/<int:build_id>/cancel/", builds.cancel, name="cancel-build"),
    path("builds/<int:build_id>/retry/", builds.retry, name="retry-build"),
    path("builds/<int:build_id>/deploy/", builds.deploy_plan, name="deploy-plan"),
    path("keys/", keys.keys, name="keys"),
    path("keys/new/", keys.issue, name="issue-key"),
    path("keys/<str:key_id>/", keys.key, name="key"),
    path("keys/<str:key_id>/edit/", keys.edit, name="edit-key"),
    path("keys/<str:key_id>/revoke/", keys.confirm, {"act": "revoke"}, name="revoke-key"),
    path("keys/<str:key_id>/suspend/", keys.confirm, {"act": "suspend"}, name="suspend-key"),
    path("keys/<str:key_id>/rotate/", keys.confirm, {"act": "rotate"}, name="rotate-key"),
    path("keys/<str:key_id>/resume/", keys.resume, name="resume-key"),
    path("audit/", audit.audit, name="audit"),
]
