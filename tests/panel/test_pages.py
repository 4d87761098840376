"""What the pages show, to whom, and what their buttons do."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deployments.models import (
    Activation,
    AuditEvent,
    Build,
    ClientKey,
    Deployment,
    Generation,
    GenerationReport,
    Host,
    HostTask,
    Replica,
    Trial,
    User,
)
from deployments.templatetags.mm import sentence
from deployments.views import usage
from mmadmin.core.spec.spec import parse_spec
from tests.panel import PASSWORD, markup, seed
from tests.support.reports import report

NAME = "mistral-medium-3.5"
PAGES = (
    "/",
    "/?archived",
    f"/deployments/{NAME}/",
    f"/deployments/{NAME}/generations/4/",
    f"/deployments/{NAME}/generations/5/",
    f"/deployments/{NAME}/measured/",
    f"/deployments/{NAME}/compare/?a=2&b=5",
    "/builds/",
    "/builds/BUILD/",
    "/builds/BUILD/log/",
    "/usage/",
    "/usage/?span=24h&deployment=mistral-medium-3.5&by=generation",
    "/usage/?span=30d&by=key",
    "/usage/?span=90d&by=day",
    "/hosts/",
    "/store/",
    "/playground/",
    f"/playground/?beside={NAME}",
    "/activations/ACTIVATION/",
)
TOKEN = {"note": "laptop", "scopes": ["read"], "days": "90"}
OPERATOR_PAGES = (
    f"/deployments/{NAME}/generations/2/rollback/",
    f"/deployments/{NAME}/rollback/",
    f"/deployments/{NAME}/stop/",
    f"/deployments/{NAME}/settings/",
    "/playground/trial/",
    f"/deployments/{NAME}/edit/",
    "/store/tasks/store-collect/",
    "/store/tasks/store-verify-contents/",
    "/deployments/new/",
    "/deployments/new/?from=smollm2-135m",
    "/keys/",
    "/keys/?search=dana&state=active",
    "/keys/KEY/",
    f"/deployments/{NAME}/generations/5/log/",
    "/audit/",
    "/audit/?verb=key.&who=ada&search=revoked",
)
ADMIN_PAGES = (
    "/people/",
    "/people/new/",
    "/people/vera/password/",
    "/keys/new/",
    "/keys/KEY/edit/",
    "/keys/KEY/revoke/",
    "/keys/KEY/rotate/",
    "/keys/KEY/suspend/",
)
PARTS = (
    "/?part=deployments",
    "/?part=alarms",
    "/?part=activity",
    "/?part=memory",
    "/hosts/?part=hosts",
    "/store/?part=tasks",
    f"/deployments/{NAME}/?part=now",
    f"/deployments/{NAME}/?part=under-way",
    f"/deployments/{NAME}/?part=timeline",
    "/builds/?part=rows",
    "/builds/BUILD/?part=head",
    "/builds/BUILD/?part=steps",
    "/activations/ACTIVATION/?part=phases",
    f"/deployments/{NAME}/generations/4/?part=trial",
    "/playground/?part=trials",
)


def address(page: str) -> str:
    """The page's address with the ids of this test's records."""
    key = ClientKey.objects.filter(revoked_at=None, suspended_at=None, expires_at=None).first()
    build = Build.objects.filter(state="running").first()
    activation = Activation.objects.filter(state="failed").first()
    assert key is not None
    assert build is not None
    assert activation is not None
    return (
        page.replace("KEY", key.key_id)
        .replace("BUILD", str(build.pk))
        .replace("ACTIVATION", str(activation.pk))
    )


def test_an_admin_sees_every_page(admin: Client) -> None:
    """Every page answers an admin, and with no inline script or style."""
    for page in (*PAGES, *OPERATOR_PAGES, *ADMIN_PAGES):
        answer = admin.get(address(page))
        assert answer.status_code == 200, page
        html = markup(answer)
        assert not re.search(r"<script(?![^>]*\bsrc=)", html), page
        assert not re.search(r"\s(style|onclick|onload|onsubmit)=", html), page


def test_a_viewer_sees_what_is_served(viewer: Client) -> None:
    """A viewer sees deployments and builds; no form but log-out, password and chat."""
    for page in PAGES:
        html = markup(viewer.get(address(page)))
        posts = re.findall(r'<form[^>]*method="post"[^>]*>', html)
        assert all("/logout/" in form for form in posts), page


def test_a_viewer_is_refused_in_words(viewer: Client) -> None:
    """What a viewer may not see answers 403 and says which role it takes."""
    for page in (*OPERATOR_PAGES, *ADMIN_PAGES):
        answer = viewer.get(address(page))
        assert answer.status_code == 403, page
        assert "it requires the" in markup(answer), page


def test_an_operator_issues_no_keys(operator: Client) -> None:
    """Keys and people are an admin's business."""
    for page in ADMIN_PAGES:
        assert operator.get(address(page)).status_code == 403, page


def test_a_stranger_is_sent_to_the_login(team: dict[str, User], client: Client) -> None:
    """Without a login there is nothing to see."""
    for page in (*PAGES, *OPERATOR_PAGES, *ADMIN_PAGES, "/account/", "/playground/"):
        answer = client.get(address(page))
        assert answer.status_code == 302, page
        assert answer["Location"].startswith("/login/?next="), page
    assert "mm password NAME" in markup(client.get("/login/"))


def test_fragments_are_the_page_s_own(admin: Client) -> None:
    """A fragment is answered alone, carries an id to be swapped by, and stands in the page too."""
    for part in PARTS:
        where = address(part)
        fragment = markup(admin.get(where))
        assert "<html" not in fragment, part
        identity = re.search(r'id="([^"]+)"', fragment)
        assert identity is not None, part
        whole = markup(admin.get(re.sub(r"[?&]part=[\w-]+", "", where)))
        assert f'id="{identity[1]}"' in whole, part


def test_a_sheet_is_the_form_alone(operator: Client) -> None:
    """Asked for with X-Sheet, a confirmation comes without the site's frame."""
    answer = operator.get(f"/deployments/{NAME}/stop/", headers={"X-Sheet": "1"})
    html = markup(answer)
    assert "<html" not in html
    assert "csrfmiddlewaretoken" in html


def test_the_overview_says_what_is_live(viewer: Client) -> None:
    """Live generation, failures and alarms are on the first page."""
    html = markup(viewer.get("/"))
    assert "generation 5, since" in html
    assert "driver changed" in html
    assert "devstral-small, generation 1" in html


def test_an_empty_installation_names_the_next_step(db: None, client: Client) -> None:
    """The first page of a fresh installation leads to the first deployment."""
    client.force_login(User.objects.create_user("ada", role="admin"))
    assert "Create the first deployment" in markup(client.get("/"))
    assert "Create the first key" in markup(client.get("/keys/"))
    assert "No builds yet" in markup(client.get("/builds/"))


def test_history_shows_who_why_and_how_long(viewer: Client) -> None:
    """The timeline has each generation's author, reason, marks and life."""
    html = markup(viewer.get(f"/deployments/{NAME}/"))
    assert "Q2_K was too lossy" in html
    assert "pinned" in html
    assert "live 3 d 23 h" in html
    assert "it does not fit" in html


def test_a_roll_back_needs_a_reason(operator: Client) -> None:
    """Without a reason the form comes back with the words beside the field, and nothing happens."""
    answer = operator.post(f"/deployments/{NAME}/generations/2/rollback/", {"reason": " "})
    assert answer.status_code == 422
    assert "Enter a reason" in markup(answer)
    assert not Activation.objects.filter(kind="rollback").exists()


def test_a_roll_back_is_foreseen(operator: Client) -> None:
    """Overlap or swap by the host's last word, how long requests wait, and of when that word is."""
    html = markup(operator.get(f"/deployments/{NAME}/generations/2/rollback/"))
    assert f"the trial of {NAME}/4 ends" in html
    Replica.objects.exclude(trial=None).delete()
    html = markup(operator.get(f"/deployments/{NAME}/generations/2/rollback/"))
    assert "GPU 0 is short of 17.0 GiB" in html
    assert f"{NAME}/5 is restored automatically" in html
    assert "New requests then wait about <strong>1 min 21 s</strong>" in html
    Host.objects.update(facts={})
    html = markup(operator.get(f"/deployments/{NAME}/generations/2/rollback/"))
    assert "its host has not reported yet" in html.lower()


def test_a_roll_back_is_asked_for(operator: Client) -> None:
    """With a reason it is queued, and the deployment's page shows it under way."""
    answer = operator.post(
        f"/deployments/{NAME}/generations/2/rollback/",
        {"reason": "tool calls stop half-way"},
        follow=True,
    )
    activation = Activation.objects.get(kind="rollback")
    assert activation.target is not None
    assert activation.target.number == 2
    assert activation.reason == "tool calls stop half-way"
    assert "Roll back to generation 2" in markup(answer)


def test_a_host_that_has_not_reported_yet(team: dict[str, User], viewer: Client) -> None:
    """Dashes instead of numbers, and no page breaks."""
    Host.objects.create(name="fresh")
    html = markup(viewer.get("/hosts/"))
    assert "worker not responding, last seen never" in html
    assert viewer.get("/").status_code == 200


def test_a_second_roll_back_is_refused_in_words(operator: Client) -> None:
    """While one is under way the form says so."""
    page = f"/deployments/{NAME}/generations/2/rollback/"
    operator.post(page, {"reason": "first"})
    answer = operator.post(page, {"reason": "second"})
    assert answer.status_code == 422
    assert "in the middle of another activation" in markup(answer)


@pytest.mark.parametrize(
    ("page", "data"),
    [
        (f"/deployments/{NAME}/generations/2/rollback/", {"reason": "x"}),
        (f"/deployments/{NAME}/stop/", {"reason": "x"}),
        ("/deployments/new/", {"spec_toml": "name = 'x'"}),
        ("/keys/new/", {"owner": "me"}),
    ],
)
def test_a_viewer_s_hand_made_request_changes_nothing(
    viewer: Client, page: str, data: dict[str, str]
) -> None:
    """The buttons are absent, and the actions refuse all the same."""
    before = (Activation.objects.count(), Build.objects.count(), ClientKey.objects.count())
    assert viewer.post(page, data).status_code == 403
    assert before == (Activation.objects.count(), Build.objects.count(), ClientKey.objects.count())


def test_a_viewer_s_mark_is_refused(viewer: Client) -> None:
    """A button's request from who may not act comes back with words."""
    answer = viewer.post(f"/deployments/{NAME}/generations/5/mark/", {"mark": "bad"}, follow=True)
    assert "may not do this" in markup(answer)
    assert Generation.objects.get(deployment__name=NAME, number=5).mark == "good"


def test_pin_and_mark(operator: Client) -> None:
    """Pin and mark change the record and come back to the history."""
    base = f"/deployments/{NAME}/generations/4"
    operator.post(f"{base}/pin/", {"on": "1"})
    operator.post(f"{base}/mark/", {"mark": "bad"})
    generation = Generation.objects.get(deployment__name=NAME, number=4)
    assert generation.pinned
    assert generation.mark == "bad"


def test_a_wrong_spec_is_explained(operator: Client) -> None:
    """A field that does not exist is named, and the text that was typed is kept."""
    text = seed.smol_spec(engine="11434.0.0").replace("slots = 2", "slotz = 2")
    answer = operator.post("/deployments/new/", {"spec_toml": text, "build": "1"})
    html = markup(answer)
    assert answer.status_code == 422
    assert "slotz" in html
    assert "slots" in html


def test_a_file_that_is_too_large(operator: Client, settings) -> None:
    """413 on a page in words, whole or as a sheet; what cannot be read otherwise is a 400."""
    form = {"spec_toml": "#" * 3_000_000, "reason": ""}
    answer = operator.post("/deployments/new/", form)
    assert answer.status_code == 413
    page = markup(answer)
    assert "The request is larger than 2.6 MB" in page
    assert 'class="frame"' in page
    sheet = operator.post("/deployments/new/", form, headers={"X-Sheet": "1"})
    assert sheet.status_code == 413
    assert 'class="frame"' not in markup(sheet)
    odd = operator.post("/deployments/new/", {f"f{n}": "" for n in range(1_001)})
    assert odd.status_code == 400
    assert "The request is malformed" in markup(odd)
    settings.ALLOWED_HOSTS = ["panel.example"]
    stray = operator.get("/", headers={"Host": "elsewhere.example"})
    assert stray.status_code == 400, "also before it is known who asks"


def test_a_build_is_asked_for(operator: Client) -> None:
    """A good spec becomes a generation and leads to its build."""
    text = seed.smol_spec(engine="11434.0.0").replace('"smollm2-135m"', '"another"')
    answer = operator.post(
        "/deployments/new/", {"spec_toml": text, "reason": "a try", "activate": "on", "build": "1"}
    )
    generation = Generation.objects.get(deployment__name="another")
    assert generation.reason == "a try"
    build = generation.builds.get()
    assert answer["Location"] == f"/builds/{build.pk}/"
    assert build.activate_after


def test_a_plan_changes_nothing(operator: Client) -> None:
    """A plan leads to a dry run, and no generation is made."""
    before = Generation.objects.count()
    answer = operator.post(
        "/deployments/new/", {"spec_toml": seed.smol_spec(engine="11434.0.0"), "plan": "1"}
    )
    build = Build.objects.order_by("-pk")[0]
    assert answer["Location"] == f"/builds/{build.pk}/"
    assert build.dry_run
    assert Generation.objects.count() == before


def test_a_build_is_cancelled_and_tried_again(operator: Client) -> None:
    """Cancel marks the running build; a failed one is built again as a new build."""
    running = Build.objects.get(state="running")
    operator.post(f"/builds/{running.pk}/cancel/")
    running.refresh_from_db()
    assert running.cancel_requested_at
    failed = Build.objects.get(state="failed")
    answer = operator.post(f"/builds/{failed.pk}/retry/")
    again = Build.objects.order_by("-pk")[0]
    assert again.pk != failed.pk
    assert answer["Location"] == f"/builds/{again.pk}/"


def test_the_log_is_shown_in_colour_and_escaped(operator: Client) -> None:
    """Terminal colours become classes; markup in a log line stays text."""
    failed = Build.objects.get(state="failed")
    step = failed.steps.get(state="failed")
    step.log.create(build=failed, text="<script>alert(1)</script>\n")
    html = markup(operator.get(f"/builds/{failed.pk}/"))
    assert '<span class="a31">nvcc fatal</span>' in html
    assert "&lt;script&gt;alert(1)" in html


def test_the_log_as_a_file(viewer: Client) -> None:
    """The whole log can be kept as a text file."""
    failed = Build.objects.get(state="failed")
    answer = viewer.get(f"/builds/{failed.pk}/log/")
    assert answer["Content-Type"].startswith("text/plain")
    assert "[159/412] Building" in markup(answer)


def test_a_key_is_shown_once(admin: Client) -> None:
    """The form leads to a page with the text; loading it again shows no key and creates none."""
    answer = admin.post("/keys/new/", {"owner": "Dana", "deployments": [NAME], "rpm": "60"})
    html = markup(admin.get(answer["Location"]))
    key = ClientKey.objects.order_by("-pk")[0]
    text = re.search(r"sk-mm-\w{12}-\w{39}", html)
    assert text is not None
    assert html.count(text[0]) == 4  # the key, curl, Python, JavaScript
    assert f'"model": "{NAME}"' in html.replace("&quot;", '"')
    assert key.rpm == 60
    assert key.deployments == [NAME]
    keys = ClientKey.objects.count()
    assert admin.get(answer["Location"])["Location"] == f"/keys/{key.key_id}/"
    assert ClientKey.objects.count() == keys
    for page in ("/keys/", f"/keys/{key.key_id}/", "/audit/"):
        assert text[0] not in markup(admin.get(page))


def test_a_key_without_an_owner_is_refused(admin: Client) -> None:
    """The words stand beside the field."""
    answer = admin.post("/keys/new/", {"owner": "", "tokens_per_day": "-4"})
    assert answer.status_code == 422
    html = markup(answer)
    assert "Enter an owner" in html
    assert 'aria-invalid="true"' in html


def test_revoke_asks_first(admin: Client) -> None:
    """Looking at the question changes nothing; answering it does."""
    key = ClientKey.objects.filter(revoked_at=None, suspended_at=None, expires_at=None)[0]
    admin.get(f"/keys/{key.key_id}/revoke/")
    key.refresh_from_db()
    assert key.state == "active"
    admin.post(f"/keys/{key.key_id}/revoke/")
    key.refresh_from_db()
    assert key.state == "revoked"
    assert AuditEvent.objects.filter(verb="key.revoke", subject=f"key:{key.key_id}").exists()


def test_suspend_resume_rotate_edit(admin: Client) -> None:
    """What else may be done to a key."""
    key = ClientKey.objects.filter(revoked_at=None, suspended_at=None, expires_at=None)[0]
    base = f"/keys/{key.key_id}"
    admin.post(f"{base}/suspend/")
    key.refresh_from_db()
    assert key.state == "suspended"
    admin.post(f"{base}/resume/")
    key.refresh_from_db()
    assert key.state == "active"
    html = markup(admin.post(f"{base}/rotate/", follow=True))
    assert re.search(r"sk-mm-\w{12}-\w{39}", html)
    admin.post(f"{base}/edit/", {"owner": "Somebody else", "rpm": "5"})
    key.refresh_from_db()
    assert key.owner == "Somebody else"
    assert key.rpm == 5


def test_key_search(operator: Client) -> None:
    """Search looks at owner, note and prefix."""
    html = markup(operator.get("/keys/?search=dana"))
    assert "Dana Ruiz" in html
    assert "Kenji Mori" not in html
    assert "No matching keys" in markup(operator.get("/keys/?search=nobodyatall"))


def test_unknown_things_are_404(viewer: Client) -> None:
    """An unknown address and an unknown deployment both get the page with a way on."""
    for page in ("/nope/", "/deployments/nope/", "/builds/99999/"):
        answer = viewer.get(page)
        assert answer.status_code == 404
        assert "Go to the overview" in markup(answer)


def test_the_number_of_queries_does_not_grow(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the records, the same number of database queries, with nothing kept from before."""
    monkeypatch.setattr(usage, "FRESH_S", -1.0)  # what is kept for a minute may expire in between
    pages = ("/", f"/deployments/{NAME}/", "/builds/", "/keys/", "/audit/", "/hosts/", "/usage/")

    def queries() -> dict[str, int]:
        counts = {}
        for page in pages:
            with CaptureQueriesContext(connection) as seen:
                assert admin.get(page).status_code == 200
            counts[page] = len(seen)
        return counts

    queries()
    before = queries()
    ada = User.objects.get(username="ada")
    deployment = Deployment.objects.get(name=NAME)
    for number in range(20, 40):
        generation = Generation.objects.create(
            deployment=deployment, number=number, spec_toml="", author=ada, reason="more"
        )
        Build.objects.create(
            deployment=deployment,
            generation=generation,
            spec_toml="",
            host=deployment.host,
            state="failed",
        )
        Deployment.objects.create(name=f"d{number}", public_name=f"d{number}", host=deployment.host)
        AuditEvent.objects.create(actor=ada, verb="deployment.deploy", summary="more")
    assert queries() == before


def test_previews_take_the_same_number_of_queries(operator: Client) -> None:
    """Whether the generation is the live one or differs from it in everything."""
    deployment = Deployment.objects.get(name=NAME)
    deployment.generations.update(state="retired")
    assert deployment.live is not None
    counts = set()
    for number in (2, 3, deployment.live.number):
        with CaptureQueriesContext(connection) as seen:
            page = f"/deployments/{NAME}/generations/{number}/activate/"
            assert operator.get(page).status_code == 200
        counts.add(len(seen))
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the disk is full", "The disk is full."),
        ("serve.temperature must be a number", "serve.temperature must be a number."),
        ("unsloth/X-GGUF is gated", "unsloth/X-GGUF is gated."),
        ('did you mean "temperature"?', 'Did you mean "temperature"?'),
        ("Already a sentence.", "Already a sentence."),
        ("", ""),
    ],
)
def test_messages_become_sentences(text: str, shown: str) -> None:
    """Identifiers keep their case, and no second full stop is added."""
    assert sentence(text) == shown


def test_guessing_is_slowed_down(team: dict[str, User], client: Client) -> None:
    """After some wrong passwords even the right one has to wait; other names do not."""
    for _ in range(8):
        answer = client.post("/login/", {"username": "vera", "password": "wrong"})
        assert answer.status_code == 200
    right = {"username": "vera", "password": PASSWORD}
    answer = client.post("/login/", right)
    assert answer.status_code == 429
    assert "Too many failed attempts" in markup(answer)
    assert 0 < int(answer["Retry-After"]) <= 15 * 60
    assert client.post("/login/", {"username": "otto", "password": PASSWORD}).status_code == 302


def test_own_password_and_tokens(viewer: Client) -> None:
    """Everybody changes their own password and makes their own API tokens, shown once."""
    new = "another long password"
    answer = viewer.post("/account/", {"current_password": "wrong", "password": new})
    assert answer.status_code == 422
    assert "current password is incorrect" in markup(answer)
    answer = viewer.post("/account/", {"current_password": PASSWORD, "password": new})
    assert answer.status_code == 302
    assert User.objects.get(username="vera").check_password(new)
    answer = viewer.post("/account/tokens/new/", TOKEN)
    html = markup(viewer.get(answer["Location"]))
    text = re.search(r"pat-mm-\w{12}-\w{39}", html)
    assert text is not None
    page = markup(viewer.get(answer["Location"], follow=True))
    assert text[0] not in page
    assert "laptop" in page
    viewer.post(f"/account/tokens/{text[0].split('-')[2]}/revoke/")
    assert "revoked" in markup(viewer.get("/account/"))


def test_a_secret_is_shown_to_its_creator_only(as_user: Callable[[str], Client]) -> None:
    """Another person who opens the address of a new token gets nothing."""
    answer = as_user("vera").post("/account/tokens/new/", TOKEN)
    assert as_user("otto").get(answer["Location"])["Location"] == "/account/"
    assert "pat-mm-" in markup(as_user("vera").get(answer["Location"]))


def test_login_after_an_ended_session_returns_to_a_page(client: Client, team: object) -> None:
    """A form that was sent without a session leads back to its page, not to the form's address."""
    where = "/login/?next=/builds/%3Fpage%3D2"
    referrer = "http://testserver/builds/?page=2"
    answer = client.post("/builds/7/cancel/", headers={"Referer": referrer})
    assert answer["Location"] == where
    answer = client.post("/builds/7/cancel/", headers={"Referer": "https://elsewhere.example/"})
    assert answer["Location"] == "/login/?next=/"
    assert client.get("/builds/?page=2")["Location"] == where


def test_a_form_s_address_opened_as_a_page(operator: Client) -> None:
    """It answers 405 with a page that says what to do."""
    answer = operator.get("/builds/7/cancel/")
    assert (answer.status_code, answer["Allow"]) == (405, "POST")
    assert "go back" in markup(answer).lower()


def test_a_plan_counts_what_the_store_has(operator: Client) -> None:
    """A plan that has ended does not look like a build that stopped before its last step."""
    plan = Build.objects.filter(state="succeeded")[0]
    Build.objects.filter(pk=plan.pk).update(dry_run=True)
    plan.steps.filter(position=0).update(state="waiting")
    head = markup(operator.get(f"/builds/{plan.pk}/?part=head"))
    assert re.search(r"\d+ steps, \d+ already in the store", head)
    assert not re.search(r"\d+ of \d+ steps", head)


def test_a_stopped_deployment_is_not_called_live(viewer: Client) -> None:
    """The line below its title is about the page's updates."""
    html = markup(viewer.get("/deployments/devstral-small/"))
    assert not re.search(r">\s*live\s*<", html)


def test_people_come_and_go(admin: Client) -> None:
    """An admin lets people in, changes roles, and keeps them out; never the last admin."""
    admin.post(
        "/people/new/", {"username": "new", "role": "viewer", "password": "a long first password"}
    )
    admin.post("/people/new/role/", {"role": "operator"})
    new = User.objects.get(username="new")
    assert new.role == "operator"
    admin.post("/people/new/password/", {"password": "yet another password"})
    new.refresh_from_db()
    assert new.check_password("yet another password")
    admin.post("/people/new/active/", {"on": "0"})
    new.refresh_from_db()
    assert not new.is_active
    answer = admin.post("/people/ada/role/", {"role": "viewer"}, follow=True)
    assert "last admin" in markup(answer)


def test_usage_as_csv(viewer: Client) -> None:
    """The table's sums, one row a group, with no cell that a spreadsheet runs."""
    answer = viewer.get("/usage/?span=7d&by=generation&csv=1")
    lines = answer.content.decode().splitlines()
    assert lines[0].startswith("deployment,generation,requests,failed,prompt_tokens")
    assert any(line.startswith(f"{NAME},5,") for line in lines)


def test_form_and_file_follow_each_other(operator: Client) -> None:
    """A change in the form comes back as the file's text; one in the file as the form."""
    text = seed.smol_spec(engine="11434.0.0")
    answer = operator.post(
        "/deployments/new/fields/",
        {"spec_toml": text, "direction": "form", "f:serve.context": "2048"},
    )
    html = markup(answer)
    assert "context = 2048" in html
    assert 'hx-swap-oob="true"' in html
    answer = operator.post(
        "/deployments/new/fields/",
        {"spec_toml": text.replace("context = 4096", "context = 77"), "direction": "file"},
    )
    assert 'value="77"' in markup(answer)
    answer = operator.post(
        "/deployments/new/fields/",
        {"spec_toml": text.replace("slots = 2", 'slots = "x"'), "direction": "file"},
    )
    assert 'data-field="serve.slots"' in markup(answer)


def test_a_warning_that_was_given_can_be_overruled(operator: Client) -> None:
    """The editor says it with the deployment's own figures; the form writes the reason down."""
    told = "a request may use 4096 tokens, the model was trained with 2048"
    warned = [{"rule": "context-beyond-training", "words": told, "remedy": "less"}]
    build = Build.objects.filter(deployment__name="smollm2-135m").latest("pk")
    Build.objects.filter(pk=build.pk).update(plan={"steps": [], "fit": [{"warnings": warned}]})
    html = markup(operator.get("/deployments/smollm2-135m/edit/"))
    assert told[1:] in html
    row = 'data-row="activation.overrule.context-beyond-training"'
    assert row in html
    answer = operator.post(
        "/deployments/new/fields/",
        {
            "spec_toml": seed.smol_spec(engine="11434.0.0"),
            "direction": "form",
            "f:activation.overrule.context-beyond-training": "rope scaling, evaluated",
        },
    )
    html = markup(answer)
    assert "[activation.overrule]" in html
    assert "rope scaling, evaluated" in html
    assert "The file is valid" in html


OFFERS = {
    "repo": "unsloth/Some-Model-GGUF",
    "commit": "c386bbc4cd613e30d8f16adf91b7584a2265b1f5",
    "licence": "apache-2.0",
    "gated": False,
    "notes": [],
    "sets": [{"name": "broken-Q2_K", "kind": "model", "quant": "Q2_K", "missing": [2]}],
    "offers": [
        {
            "quant": "Q4_K_M",
            "name": "Some-Model-Q4_K_M",
            "files": ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
            "size_bytes": 71 * 2**30,
            "context_train": 131072,
            "exact": True,
            "fit": [
                {
                    "host": "v100-box",
                    "ok": True,
                    "devices": [0, 1],
                    "per_device_bytes": [20 * 2**30, 21 * 2**30],
                    "words": "fits on 2 GPUs",
                },
                {"host": "local", "ok": False, "devices": [], "words": "local: 47 GiB too large"},
            ],
        }
    ],
}


def test_the_editor_offers_the_hosts_and_takes_no_nonsense(operator: Client) -> None:
    """Names of hosts to choose from; a generation that is no number is none."""
    html = markup(operator.get(f"/deployments/{NAME}/edit/"))
    assert '<option value="v100-box">' in html
    assert 'list="host-names"' in html
    assert operator.get(f"/deployments/{NAME}/edit/?generation=\u00b2").status_code == 200
    assert operator.get(f"/deployments/{NAME}/edit/?generation=99").status_code == 404


def test_a_hub_repository_is_looked_at(operator: Client) -> None:
    """Sets with size and fit; choosing one leads to a file that parses."""
    answer = operator.post("/deployments/new/search/", {"repo": "unsloth/Some-Model-GGUF"})
    job = HostTask.objects.get()
    assert answer["Location"] == f"/deployments/new/search/{job.pk}/"
    assert "Reading the file list" in markup(operator.get(answer["Location"]))
    HostTask.objects.filter(pk=job.pk).update(state="succeeded", result=OFFERS)
    html = markup(operator.get(answer["Location"]))
    assert "fits on 2 GPUs" in html
    assert "47 GiB too large" in html
    assert "broken-Q2_K" in html
    chosen = re.search(r'href="(/deployments/new/\?repo=[^"]+)"', html)
    assert chosen is not None
    page = operator.get(chosen[1].replace("&amp;", "&"))
    spec = parse_spec(page.context["form"]["spec_toml"].value())
    assert (spec.name, spec.model.quant) == ("some-model", "Q4_K_M")
    assert spec.model.revision == OFFERS["commit"]


def test_nonsense_is_no_repository(operator: Client) -> None:
    """The words come back to the page of a new deployment."""
    answer = operator.post("/deployments/new/search/", {"repo": "not a repo"}, follow=True)
    assert "is not a repository" in markup(answer)


def test_a_plan_says_whether_it_fits(operator: Client) -> None:
    """The forecast stands above the steps, with what to do where it does not fit."""
    plan = Build.objects.filter(dry_run=True)[0]
    fit = [{"host": "local", "ok": False, "words": "47 GiB too large", "remedy": "choose Q4_K_M"}]
    Build.objects.filter(pk=plan.pk).update(plan={"fit": fit})
    html = markup(operator.get(f"/builds/{plan.pk}/"))
    assert "Will it fit?" in html
    assert "47 GiB too large" in html
    assert "Choose Q4_K_M." in html


def test_a_plan_says_what_is_left_of_the_disk(operator: Client) -> None:
    """What is fetched and written, and what is free before and afterwards, or lacking."""
    gib = 2**30
    plan = Build.objects.filter(dry_run=True)[0]
    disk = {"fetch_bytes": 70 * gib, "written_bytes": 140 * gib, "disk_free_bytes": 150 * gib}
    Build.objects.filter(pk=plan.pk).update(plan=disk)
    assert "10.0 GiB</dd>" in markup(operator.get(f"/builds/{plan.pk}/"))
    short = disk | {"disk_free_bytes": 101 * gib, "disk_usable_bytes": 100 * gib}
    Build.objects.filter(pk=plan.pk).update(plan=short)
    html = markup(operator.get(f"/builds/{plan.pk}/"))
    assert "short by 40.0 GiB; 1.0 GiB must stay free" in html


def test_what_the_template_s_patches_change(viewer: Client) -> None:
    """Every conversation before and after: signs and words say what changed, not colour alone."""
    html = markup(viewer.get(f"/deployments/{NAME}/generations/5/"))
    shown = html.split('id="rendering"')[1].split("</section>")[0]
    assert "the default of reasoning_effort is none" in shown
    assert re.findall(r'<summary><span class="strong">([\w-]+)</span>', shown) == [
        "system",
        "effort-medium",
        "plain",
    ]
    assert '<div class="del">-[THINK]</div>' in shown
    assert "+++ after" not in shown
    assert "0 lines added, 1 removed" in shown
    assert "now renders" in shown
    assert "must be none or high, got medium" in shown
    assert "unchanged" in shown
    other = markup(viewer.get("/deployments/smollm2-135m/generations/1/"))
    assert 'id="rendering"' not in other


def test_memory_predicted_and_measured(viewer: Client) -> None:
    """Generation and host say part by part how far the prediction was off, in words too."""
    for page in (f"/deployments/{NAME}/generations/5/", "/hosts/"):
        html = markup(viewer.get(page))
        rows = re.findall(
            r'<td class="lead">(GPU \d)</td>.*?>([\d.]+ GiB)</td>.*?>([\d.]+ GiB)</td>(.*?)</tr>',
            html,
        )
        assert [row[:3] for row in rows[-4:]][3] == ("GPU 3", "22.9 GiB", "24.8 GiB"), page
        assert "7.7 % low" in rows[3][3]
        assert "st warn" in rows[3][3]
        assert "exact" in rows[1][3]
        assert "0.2 % high" in rows[2][3]


def test_who_holds_a_machine_without_cards(viewer: Client) -> None:
    """Main memory names its engines by what they were measured to hold, and the rest."""
    html = markup(viewer.get("/"))
    assert "smollm2-135m/1 304 MiB" in html
    assert "Memory: 7.0 of 24.0 GiB in use (smollm2-135m/1, other processes)" in html
    running = Replica.objects.get(generation__deployment__name="smollm2-135m").generation
    report(running, probe_report={"memory": [{"part": "main memory", "measured": 30 * 2**30}]})
    html = markup(viewer.get("/"))
    assert "24.0 of 24.0 GiB in use (smollm2-135m/1)" in html


def test_what_was_measured_side_by_side(viewer: Client) -> None:
    """Each probed generation with its figures, the live one named; and what there is without any."""
    page = f"/deployments/{NAME}/measured/"
    html = markup(viewer.get(page))
    assert html.index("Generation 5") < html.index("Generation 4")
    assert "9.1 tok/s" in html
    assert "95.9 GiB" in html
    probes = GenerationReport.objects.filter(kind="probe_report")
    probes.update(data={"rows": []})
    assert "Generation 5" in markup(viewer.get(page))
    probes.delete()
    assert "No benchmarks yet" in markup(viewer.get(page))


def test_an_engine_s_log_is_read_on_its_host(operator: Client, viewer: Client, settings) -> None:
    """Its end, escaped and in colour; other hosts are named; a viewer reads why not."""
    page = "/deployments/smollm2-135m/generations/1/log/"
    assert "No lines yet" in markup(operator.get(page))
    replica = Replica.objects.get(generation__deployment__name="smollm2-135m")
    folder = settings.HOME.logs / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    text = "x" * 200_000 + "\nload: \x1b[31m<b>slow</b>\x1b[0m\nslot 0 is free\n"
    (folder / f"{replica.uid}.log").write_text(text)
    html = markup(operator.get(f"{page}?part=lines"))
    assert html.count("data-line") == 2
    assert '<span class="a31">&lt;b&gt;slow&lt;/b&gt;</span>' in html
    answer = operator.get(f"{page}?download")
    assert answer.content.decode().endswith("slot 0 is free\n")
    assert replica.uid in answer["Content-Disposition"]
    assert viewer.get(page).status_code == 403
    away = markup(operator.get(f"/deployments/{NAME}/generations/5/log/"))
    assert "This log is on v100-box" in away
    assert f"mm logs {NAME}/5" in away
    assert operator.get(f"/deployments/{NAME}/generations/1/log/").status_code == 404


def test_settings_that_make_no_generation(operator: Client, viewer: Client) -> None:
    """They are shown as they are, changed at once and in the audit log; nonsense stands beside its field."""
    page = f"/deployments/{NAME}/settings/"
    html = markup(operator.get(page))
    assert 'name="keep_generations" value="5"' in html
    changed = {"description": "for <legal>", "keep_generations": "9"}
    assert operator.post(page, changed)["Location"] == f"/deployments/{NAME}/"
    of = Deployment.objects.get(name=NAME)
    assert (of.description, of.keep_generations, of.auto_rollback) == ("for <legal>", 9, False)
    assert "for &lt;legal&gt;" in markup(viewer.get(f"/deployments/{NAME}/"))
    assert AuditEvent.objects.filter(verb="deployment.configure").count() == 1
    wrong = operator.post(page, {"keep_generations": "0"})
    assert wrong.status_code == 422
    assert b'class="wrong"' in wrong.content
    assert viewer.post(page, changed).status_code == 403


def test_a_mark_says_why(operator: Client, viewer: Client) -> None:
    """From a generation's page, with a reason that everybody reads there; a viewer has no form."""
    page = f"/deployments/{NAME}/generations/3/"
    form = {"from": "generation", "mark": "bad", "reason": "loops on <b>long</b> results"}
    answer = operator.post(f"{page}mark/", form)
    assert answer["Location"] == page
    html = markup(operator.get(page))
    assert f"{NAME}/3 is bad: loops on &lt;b&gt;long&lt;/b&gt; results" in html
    assert "Remove 'bad'" in html
    operator.post(f"{page}pin/", {"from": "generation", "on": "1", "reason": "the last Q5"})
    html = markup(viewer.get(page))
    assert f"pin {NAME}/3: the last Q5" in html
    assert "said-reason" not in html


def test_collecting_the_store(operator: Client, viewer: Client) -> None:
    """A collection is asked about first; what a worker found stands on the page, for viewers too."""
    assert "Clean up the store?" in markup(operator.get("/store/tasks/store-collect/"))
    assert not HostTask.objects.exists()
    assert operator.post("/store/tasks/store-collect/")["Location"] == "/store/"
    job = HostTask.objects.get()
    assert (job.kind, job.state, job.host.name) == ("store-collect", "queued", "local")
    again = markup(operator.post("/store/tasks/store-collect/", follow=True))
    assert "under way on local already" in again
    result = {
        "freed_bytes": 3 * 2**30,
        "objects": 2,
        "names": ["aa-old-model"],
        "files": 5,
        "kept_objects": 7,
        "let_go": ["mistral-medium-3.5/1"],
        "seconds": 1.0,
    }
    HostTask.objects.update(state="succeeded", result=result)
    html = markup(viewer.get("/store/?part=tasks"))
    assert "Freed <strong>3.0 GiB</strong>: 2 objects and 5 files removed, 7 objects kept." in html
    assert "mistral-medium-3.5/1" in html
    assert "<form" not in html
    assert operator.get("/store/tasks/doctor/").status_code == 404


def test_damage_and_progress_of_a_verification(operator: Client) -> None:
    """How far it is while it reads, with a way to end it; then what is damaged and how to mend it."""
    operator.post("/store/tasks/store-verify-contents/")
    HostTask.objects.update(state="running", progress_done=2**30, progress_total=4 * 2**30)
    html = markup(operator.get("/store/?part=tasks"))
    assert "1.0 GiB of 4.0 GiB read" in html
    operator.post(re.findall(r'action="(/store/cancel/\d+/)"', html)[0])
    assert HostTask.objects.get().cancel_requested_at is not None
    damaged = [
        {
            "name": "aa-model",
            "state": "corrupt",
            "problems": [{"path": "m.gguf", "problem": "is gone"}],
        }
    ]
    result = {
        "ok": 4,
        "corrupt": 1,
        "missing": 0,
        "contents": True,
        "read_bytes": 9,
        "damaged": damaged,
    }
    HostTask.objects.update(state="succeeded", result=result)
    html = markup(operator.get("/store/"))
    assert "1 damaged, 0 missing" in html
    assert "m.gguf is gone" in html
    assert "mm store repair" in html


def test_the_doctor_is_asked_on_the_hosts_page(operator: Client, viewer: Client) -> None:
    """Each host has its own button and its own answer, what is wrong first, with remedies."""
    assert operator.post("/hosts/v100-box/examine/")["Location"] == "/hosts/"
    assert HostTask.objects.get().host.name == "v100-box"
    checks = [
        {"name": "disk", "level": "ok", "fact": "much is free", "remedy": ""},
        {"name": "clock", "level": "fail", "fact": "it is 400 s late", "remedy": "set up NTP"},
    ]
    HostTask.objects.update(state="succeeded", result={"checks": checks})
    html = markup(viewer.get("/hosts/"))
    assert "→ set up NTP" in html
    assert html.index("it is 400 s late") < html.index("much is free")
    assert "/examine/" not in html
    assert (
        viewer.post("/hosts/local/examine/", follow=True).content.decode().count("it requires the")
    )


def test_one_s_own_logins(team: dict[str, User]) -> None:
    """Each browser's login is listed with where it is; ending one puts it out, and only its owner can."""
    laptop, phone, other = (
        Client(REMOTE_ADDR=address, headers={"user-agent": agent})
        for address, agent in (
            ("10.0.0.1", "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"),
            ("10.0.0.2", "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0) Version/18.0 Safari/604.1"),
            ("10.0.0.3", "curl/8"),
        )
    )
    for client, name in ((laptop, "vera"), (phone, "vera"), (other, "otto")):
        answer = client.post("/login/", {"username": name, "password": PASSWORD})
        assert answer.status_code == 302
    html = markup(laptop.get("/account/"))
    assert "Firefox on Linux" in html
    assert "Safari on iPhone" in html
    assert "10.0.0.2" in html
    assert "curl/8" not in html
    assert laptop.session.session_key not in html
    assert phone.session.session_key not in html
    ends = re.findall(r'action="(/account/sessions/\w+/)"', html)
    assert len(ends) == 1
    assert "ended already" in markup(other.post(ends[0], follow=True))
    assert phone.get("/account/").status_code == 200
    assert laptop.post(ends[0]).status_code == 302
    assert phone.get("/account/").status_code == 302
    assert laptop.get("/account/").status_code == 200


def test_all_other_logins_end_at_once(team: dict[str, User]) -> None:
    """By the button, by a new password, and when an admin keeps somebody out."""
    here, there, admin = Client(), Client(), Client()
    for client in (here, there):
        client.force_login(team["vera"])
    admin.force_login(team["ada"])
    here.post("/account/sessions/")
    assert there.get("/account/").status_code == 302
    assert here.get("/account/").status_code == 200
    there.force_login(team["vera"])
    here.post("/account/", {"current_password": PASSWORD, "password": "another long password"})
    assert there.get("/account/").status_code == 302
    assert here.get("/account/").status_code == 200
    admin.post("/people/vera/active/", {"on": "0"})
    assert here.get("/account/").status_code == 302
    admin.post("/people/vera/active/", {"on": "1"})
    assert here.get("/account/").status_code == 302


def ended(state: str, **more: object) -> Trial:
    """The seeded trial, as its host's worker left it just now."""
    trial = Trial.objects.get(generation__number=4)
    Trial.objects.filter(pk=trial.pk).update(
        state=state, phase="stop", ended_at=timezone.now(), **more
    )
    return trial


def test_many_logins_and_people_come_in_pages(admin: Client, team: dict[str, User]) -> None:
    """Each list of a page turns by itself; people are searched by name and address."""
    for _ in range(23):
        Client().force_login(team["ada"])
    html = markup(admin.get("/account/?logins=2"))
    assert html.count('<span class="strong">') == 10
    assert 'href="?logins=1"' in html
    assert 'href="?logins=3"' in html
    for n in range(120):
        User.objects.create(username=f"p{n:03}", email=f"p{n:03}@example.net", role="viewer")
    html = markup(admin.get("/people/"))
    assert "124 people, page 1 of 3" in html
    assert "p119" not in html
    html = markup(admin.get("/people/?search=P119@"))
    assert "p119@example.net" in html
    assert "p118" not in html
    assert "No matching users" in markup(admin.get("/people/?search=zzz"))


def test_a_trial_is_begun_from_its_form(operator: Client) -> None:
    """What can be tried is offered, wrong input stays in the form, and the playground is next."""
    page = markup(operator.get("/playground/trial/"))
    assert "Nothing to try" in page, "the only one that could be is on trial"
    ended("succeeded")
    page = markup(operator.get(f"/playground/trial/?which={NAME}/2"))
    assert f'<option value="{NAME}/2" selected>' in page
    assert f'value="{NAME}/5"' not in page, "it is live"
    good = {"which": f"{NAME}/2", "minutes": "15", "reason": "see"}
    for wrong in ({"minutes": "0"}, {"minutes": "x"}, {"which": f"{NAME}/5"}, {"which": "/"}):
        assert operator.post("/playground/trial/", good | wrong).status_code == 422, wrong
    answer = operator.post("/playground/trial/", good)
    assert (answer.status_code, answer["Location"]) == (302, f"/playground/?beside={NAME}")
    trial = Trial.objects.latest("pk")
    assert (trial.generation.number, trial.minutes, trial.reason) == (2, 15, "see")
    assert trial.actor is not None
    assert trial.actor.username == "otto"


def test_a_trial_is_ended_from_a_page(operator: Client, viewer: Client) -> None:
    """By a form that leads back to the generation, or under an open page that stays as it is."""
    trial = Trial.objects.get(generation__number=4)
    where = f"/playground/trial/{trial.pk}/end/"
    assert viewer.post(where, headers={"HX-Request": "true"}).status_code == 403
    assert Trial.objects.get(pk=trial.pk).cancel_requested_at is None
    answer = operator.post(where)
    assert answer["Location"] == f"/deployments/{NAME}/generations/4/"
    assert Trial.objects.get(pk=trial.pk).ending == "ended by otto"
    assert operator.post(where, headers={"HX-Request": "true"}).status_code == 204
    ended("succeeded")
    assert operator.post(where, headers={"HX-Request": "true"}).status_code == 409


def test_a_trial_that_failed_says_why(operator: Client, viewer: Client) -> None:
    """In the playground, where somebody waits for it, and on the generation's page."""
    error = {"message": "It does not fit beside what runs.", "remedy": "stop other first"}
    ended("failed", error=error)
    for client in (operator, viewer):
        for page in ("/playground/", f"/deployments/{NAME}/generations/4/"):
            html = markup(client.get(page))
            assert "It does not fit beside what runs." in html, page
            assert "Stop other first." in html, page
    Trial.objects.filter(generation__number=4).update(ended_at=timezone.now() - timedelta(hours=1))
    assert "does not fit" not in markup(operator.get("/playground/")), "old news"


def test_only_what_answers_can_be_asked(viewer: Client) -> None:
    """A trial that starts is named but cannot be chosen yet; one that ends is no choice any more."""
    page = markup(viewer.get("/playground/"))
    assert re.search(rf'<option value="{NAME}/4"[^>]*data-trial>', page)
    Trial.objects.filter(generation__number=4).update(phase="probe", opened_at=None, ends_at=None)
    page = markup(viewer.get("/playground/"))
    assert re.search(rf'<option value="{NAME}/4"[^>]*data-trial disabled>', page)
    assert "loading and testing the engine" in page
    Trial.objects.filter(generation__number=4).update(phase="drain")
    assert f'value="{NAME}/4"' not in markup(viewer.get("/playground/"))


def test_a_build_says_what_it_waits_for(viewer: Client, settings) -> None:
    """A free place, when others take them all; another build, when it makes the same step."""
    settings.BUILDS_AT_ONCE = 1
    running = Build.objects.get(state="running")
    Build.objects.filter(pk=running.pk).update(lease_expires_at=timezone.now() + timedelta(hours=1))
    queued = Build.objects.create(host=running.host, spec_toml="")
    text = markup(viewer.get(f"/builds/{queued.pk}/"))
    assert "Waiting: 1 build running, the limit is reached (MM_BUILDS_AT_ONCE)" in text
    running.steps.filter(state="running").update(state="waiting", waits_for="build 3 of other/1")
    text = markup(viewer.get(f"/builds/{running.pk}/"))
    assert "Waits for build 3 of other/1" in text
    running.steps.filter(state="waiting").update(waits_for="")
    Build.objects.filter(pk=running.pk).update(state="succeeded")
    text = markup(viewer.get(f"/builds/{queued.pk}/"))
    assert "Waiting for the host's worker" in text


def test_every_build_under_way_is_on_the_deployment_s_page(viewer: Client) -> None:
    """The newest first; none hides another."""
    deployment = Deployment.objects.get(name=NAME)
    made = [
        Build.objects.create(deployment=deployment, host=deployment.host, spec_toml="")
        for _ in range(2)
    ]
    text = markup(viewer.get(f"/deployments/{NAME}/"))
    first, second = (text.index(f"Build {build.pk}</a>") for build in made)
    assert second < first


def test_a_person_that_does_not_exist_has_no_page(admin: Client) -> None:
    """404 with their name, before a password is typed."""
    answer = admin.get("/people/nobody/password/")
    assert answer.status_code == 404
    assert "nobody" in markup(answer)


def test_the_icon_is_found_where_browsers_ask_for_it(client: Client) -> None:
    """Also by nobody, and on pages that name none."""
    answer = client.get("/favicon.ico")
    assert answer.status_code == 301
    assert answer["Location"].endswith(".svg")


def test_the_menu_leads_to_a_new_deployment(operator: Client, viewer: Client) -> None:
    """From every page, for those who may."""
    link = 'href="/deployments/new/"'
    assert link in markup(operator.get("/usage/"))
    assert link not in markup(viewer.get("/usage/"))
