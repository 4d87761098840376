"""The API keeps to its own schema, whatever is sent: schemathesis makes the requests."""

from __future__ import annotations

import warnings

import pytest
from django.core.handlers.wsgi import WSGIHandler
from hypothesis import HealthCheck, given, settings

from deployments import actions
from deployments.api import api
from deployments.models import User, UserToken
from tests.deployments.conftest import People
from tests.deployments.specs import spec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("toy_machine"),
    pytest.mark.timeout(1800),
]


SCHEMA = schemathesis.openapi.from_dict(api.get_openapi_schema())
SCHEMA.app = WSGIHandler()
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_any_request_gets_an_answer_of_the_schema(people: People, operation) -> None:
    """No server error, no undocumented status, no answer that the schema does not describe."""
    actions.deploy(people.bob, spec(), reason="x")
    actions.issue_key(people.alice, owner="x")
    _, text = actions.issue_token(people.alice, scopes=["admin"])

    @given(case=operation.as_strategy())
    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def check(case) -> None:
        User.objects.filter(username="alice").update(is_active=True, role="admin")
        UserToken.objects.update(revoked_at=None)
        case.call_and_validate(headers={"Authorization": f"Bearer {text}"}, checks=CHECKS)

    check()
