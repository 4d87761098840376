"""A worker that waits in a phase of an activation until a test lets it go on.

The worker of one installation is run with `tests.e2e.held_settings`, which are the product's own
and this application, `Holds`; everything else of the installation is as it always is. Where the
installation's folder `run/holds` has a file that is named like the phase, the worker has done what
the phase is for when it waits: it is killed with the record at a phase whose effects are there, so
that whoever comes next does it all once more. `reached` there says that it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.apps import AppConfig

from mmadmin.core.home import Home
from tests.e2e.installation import Installation
from tests.e2e.kills import Case, Row

PRODUCT, HELD = "mmadmin.settings", "tests.e2e.held_settings"
POLL_S = 0.02


def holds_of(home: Home) -> Path:
    """Where the holds of an installation lie."""
    return home.run_dir / "holds"


class Holds(AppConfig):
    """The worker's part."""

    name = "tests.e2e.holds"

    def ready(self) -> None:
        """Let runs wait where a phase is held."""
        from django.conf import settings

        from deployments.jobs.activations import ActivationRun
        from mmadmin.core.generations.activation import Phase

        folder = holds_of(settings.HOME)
        do = ActivationRun._do

        def held(run: Any, phase: Phase) -> None:
            do(run, phase)
            while (folder / phase.value).exists():
                (folder / "reached").touch()
                run.recorder.wait(POLL_S)

        ActivationRun._do = held  # type: ignore[method-assign]


@contextmanager
def held_worker(site: Installation) -> Iterator[None]:
    """The installation's worker minds the holds while the block runs."""
    holds_of(site.home).mkdir(exist_ok=True)
    _settings(site, PRODUCT, HELD)
    try:
        yield
    finally:
        _settings(site, HELD, PRODUCT)


def _settings(site: Installation, old: str, new: str) -> None:
    """Run the worker with other settings."""
    path = site.home.supervisor / "services" / "worker.conf"
    text = path.read_text(encoding="utf-8")
    assert text.count(f'"{old}"') == 1
    path.write_text(text.replace(f'"{old}"', f'"{new}"'), encoding="utf-8")
    site.supervisor._reload_services()


class Hold:
    """A trap that misses nothing: the worker waits in the phase."""

    tries = 1

    def __init__(self, site: Installation) -> None:
        self._folder = holds_of(site.home)

    @contextmanager
    def laid(self, case: Case) -> Iterator[None]:
        """The phase is held."""
        hold, reached = self._folder / case.phase, self._folder / "reached"
        reached.unlink(missing_ok=True)
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def has(self, case: Case, row: Row) -> bool:
        """The worker waits."""
        return (self._folder / "reached").exists()

    @contextmanager
    def kept(self, case: Case) -> Iterator[bool]:
        """It waits for as long as the hold is there."""
        yield True
