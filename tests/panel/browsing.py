"""Debian's Chromium, driven by Playwright, and an eye on everything that a page complains about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.panel import PASSWORD

PATIENCE_MS = 120_000
"""What anything may take on a machine that does other things too."""
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's is small
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. Where there is none, the tests say how to get it."""
    if not CHROMIUM.exists():
        pytest.fail("the browser tests need Debian's Chromium: apt-get install -y chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


class Complaints(list[str]):
    """What the console, the scripts and the content policy complained about."""

    def watch(self, page: Page) -> None:
        """Note them from now on."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.append(f"{page.url}: {error}"))

    def _console(self, message: ConsoleMessage) -> None:
        expected = "the server responded with a status of 4" in message.text
        if message.type in {"error", "warning"} and not expected:
            self.append(f"{message.location.get('url')}: {message.text}")


@contextmanager
def visit(browser: Browser, url: str, name: str | None, *, width: int = 1440) -> Iterator[Page]:
    """A fresh window, logged in as one of the team; it must end without a complaint."""
    context = browser.new_context(viewport={"width": width, "height": 900}, base_url=url)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints = Complaints()
    complaints.watch(page)
    try:
        if name is not None:
            login(page, name)
        yield page
        assert not complaints, "\n".join(complaints)
    finally:
        context.close()


def login(page: Page, name: str, password: str = PASSWORD) -> None:
    """Come in as a person would."""
    page.goto("/login/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Overview", exact=True).wait_for()
