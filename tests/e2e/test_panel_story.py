"""The main job in the browser: log in, deploy, watch, key, call, change, compare, go back, revoke."""

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.installation import ROOT, Installation, wait_for
from tests.panel.browsing import chromium, login, visit

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]

NAME = "browser-smol"
PASSWORD = "a password for the browser"
SET_PASSWORD = """
import os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "mmadmin.settings"
django.setup()
from deployments.models import User
user = User.objects.get(username="admin")
user.set_password(os.environ["NEW_PASSWORD"])
user.save()
"""
PATIENCE_MS = 180_000


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with chromium() as running:
        yield running


def deploy(page: Page, text: str, reason: str) -> None:
    """Write the file, build it, and watch until the generation is live."""
    page.get_by_label("Deployment file").fill(text)
    page.locator("#id_reason").fill(reason)
    page.get_by_role("button", name=re.compile("^Build")).click()
    page.wait_for_url(re.compile(r"/builds/\d+/"))
    done = page.get_by_role("link", name=f"Go to {NAME}")
    done.wait_for(timeout=PATIENCE_MS)
    done.click()


def live(page: Page, number: int) -> None:
    """The page says by itself, without reloading, that the generation is live."""
    now = page.locator("#now")
    expect(now.get_by_role("link", name=str(number), exact=True)).to_be_visible(timeout=PATIENCE_MS)
    expect(now.get_by_text("live", exact=True)).to_be_visible(timeout=PATIENCE_MS)


def test_the_whole_story(site: Installation, browser: Browser) -> None:
    """From the first login to the 401 of a revoked key, with the real engine behind it."""
    subprocess.run(
        [sys.executable, "-c", SET_PASSWORD],
        env=site.env | {"NEW_PASSWORD": PASSWORD},
        cwd=ROOT,
        check=True,
    )
    with visit(browser, site.panel, None) as page:
        login(page, "admin", PASSWORD)
        page.get_by_role("main").get_by_role("link", name="New deployment").click()
        page.get_by_role("link", name=re.compile("^smollm2-135m")).click()
        file = page.get_by_label("Deployment file")
        first = file.input_value().replace('name = "smollm2-135m"', f'name = "{NAME}"')
        deploy(page, first, "try it in the browser")
        live(page, 1)

        page.get_by_role("link", name="Keys").click()
        page.get_by_role("link", name=re.compile("^Create")).first.click()
        page.get_by_label("Owner").fill("browser story")
        page.get_by_role("button", name="Create key").click()
        key = page.locator("#key-text").inner_text()
        assert f'"model": "{NAME}"' in page.locator("#curl").inner_text()
        assert site.answered(key, NAME) == f"{NAME}/1"

        page.goto(f"/deployments/{NAME}/")
        page.get_by_role("link", name="Edit").click()
        deploy(page, first.replace("slots = 2", "slots = 1"), "one slot")
        live(page, 2)
        assert site.answered(key, NAME) == f"{NAME}/2"

        page.get_by_label("Select generation 1 to compare").check()
        page.get_by_label("Select generation 2 to compare").check()
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.get_by_role("rowheader", name="serve.slots")).to_be_visible()

        page.goto(f"/deployments/{NAME}/")
        page.get_by_role("link", name="Roll back to this").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Reason").fill("two slots were better")
        dialog.get_by_role("button", name="Roll back").click()
        live(page, 1)
        assert site.answered(key, NAME) == f"{NAME}/1"

        page.get_by_role("link", name="Playground").click()
        page.wait_for_url("**/playground/")  # once it is loaded, its script is there to send
        page.get_by_label("Model").select_option(NAME)
        page.get_by_label("Your message").fill("Say hello.")
        page.keyboard.press("Enter")
        expect(page.locator("[data-stats]")).to_contain_text(f"{NAME}/1", timeout=PATIENCE_MS)

        page.goto(f"/keys/{key.split('-')[2]}/")
        page.get_by_role("link", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke permanently").click()
        expect(page.get_by_role("main").get_by_text("permanently revoked")).to_be_visible()
    wait_for(
        "the refusal",
        lambda: site.ask(key, NAME).status_code == httpx2.codes.UNAUTHORIZED,
    )
    site.run("stop", NAME, "--reason", "the story is over")
