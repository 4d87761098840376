"""Fixtures that several rooms' tests share, and what makes every run the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine import EngineStore
from tests.support.engine import engine_store as open_engine_store

ENGINE_TIMEOUT_S = 1800
"""Tests with the real engine wait for a model that thinks on a busy processor."""
FOUND = pytest.StashKey[EngineStore | Exception]()

# The same examples in every run, however long the machine takes for one.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)
settings.load_profile("suite")


@pytest.hookimpl(trylast=True)  # after the folders have marked theirs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests with the real engine their time."""
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Open the engine's store before the first test: building it is on no test's clock."""
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker("engine") for item in session.items):
        try:
            session.config.stash[FOUND] = open_engine_store()
        except Exception as error:  # noqa: BLE001 (whoever needs it is told)
            session.config.stash[FOUND] = error


@pytest.fixture(scope="session")
def engine_store(pytestconfig: pytest.Config) -> EngineStore:
    """The real engine and model, built by our own recipes into the test cache."""
    found = pytestconfig.stash[FOUND]
    if isinstance(found, Exception):
        raise found
    return found
