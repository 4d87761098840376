"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import pytest

from tests.support.engine import EngineStore
from tests.support.engine import engine_store as open_engine_store

ENGINE_TIMEOUT_S = 1800
"""The first test that needs the engine may have to build it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests with the real engine the time that building it takes."""
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session")
def engine_store() -> EngineStore:
    """The real engine and model, built by our own recipes into the test cache."""
    return open_engine_store()
