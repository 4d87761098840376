"""One installation for the tests of this folder: it takes some seconds to bring up."""

from collections.abc import Iterator

import pytest

from tests.e2e.installation import Installation, installation
from tests.support.engine import EngineStore


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here uses the real engine."""
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def site(
    engine_store: EngineStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """An installation that is up."""
    yield from installation(tmp_path_factory.mktemp("site"), engine_store)
