"""Fixtures of the panel: the seeded team, a client a person, a real server for the browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from deployments.models import User
from tests.deployments.conftest import broker, broker_url
from tests.panel import seed

__all__ = ["broker", "broker_url"]


@pytest.fixture
def team(db: None) -> dict[str, User]:
    return seed.everything()


@pytest.fixture
def as_user(team: dict[str, User]) -> Callable[[str], Client]:
    """A client that is logged in as one of the team."""

    def client(name: str) -> Client:
        client = Client()
        client.force_login(team[name])
        return client

    return client


@pytest.fixture
def admin(as_user: Callable[[str], Client]) -> Client:
    return as_user("ada")


@pytest.fixture
def operator(as_user: Callable[[str], Client]) -> Client:
    return as_user("otto")


@pytest.fixture
def viewer(as_user: Callable[[str], Client]) -> Client:
    return as_user("vera")
