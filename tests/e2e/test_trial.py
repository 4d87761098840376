"""Two generations of the real engine side by side: each is asked by its name and answers as itself."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.e2e.installation import CATALOG, Installation

NAME = "tried-smol"
LONG = "one two three four five six seven eight nine ten " * 150
"""About 1500 tokens: more than the small context, less than the large one."""


class Playground:
    """A browser's side of the panel: the chat goes through its relay, with its own kind of key."""

    def __init__(self, site: Installation) -> None:
        password = site.json("password", "admin")["password"]
        self.client = httpx2.Client(base_url=site.panel, timeout=180, trust_env=False)
        self.client.get("/login/")
        came = self.client.post(
            "/login/",
            data={
                "username": "admin",
                "password": password,
                "csrfmiddlewaretoken": self.client.cookies["csrftoken"],
            },
        )
        assert came.is_redirect, came.text

    def ask(self, model: str, words: str) -> httpx2.Response:
        """One chat completion, as the page sends it."""
        return self.client.post(
            "/playground/chat/",
            headers={"X-CSRFToken": self.client.cookies["csrftoken"]},
            json={
                "model": model,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 8,
            },
        )

    def models(self) -> dict[str, bool]:
        """What the page offers: the model, and whether it can be asked."""
        page = self.client.get("/playground/").text
        options = re.findall(r'<option\s+value="([^"]+)"\s+data-of="[^"]+"([^>]*)>', page)
        return {name: "disabled" not in more for name, more in options}


def spec(folder: Path, context: int) -> str:
    """The catalog's deployment under another name, with this context."""
    text = (CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")
    text = text.replace('"smollm2-135m"', f'"{NAME}"')
    text = re.sub(r"(?m)^context = \d+", f"context = {context}", text)
    path = folder / f"{context}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def play(site: Installation) -> Iterator[Playground]:
    """The playground of an administrator who is logged in."""
    playground = Playground(site)
    yield playground
    playground.client.close()


@pytest.mark.timeout(900)
def test_two_generations_side_by_side(site: Installation, play: Playground, tmp_path: Path) -> None:
    """Live and on trial at once, going live with the engine on trial, and back to one."""
    site.run("deploy", spec(tmp_path, 4096), "--reason", "large context")
    site.run("deploy", spec(tmp_path, 1024), "--reason", "small context", "--no-activate")
    begun = site.json("trial", NAME, "2", "--minutes", "20", "--reason", "is it enough?")
    assert (begun["model"], begun["status"]) == (f"{NAME}/2", "open")
    assert site.deployment(NAME)["live_generation"] == 1

    assert play.models()[NAME]
    assert play.models()[f"{NAME}/2"]
    for model, number in ((NAME, 1), (f"{NAME}/2", 2)):
        answer = play.ask(model, "Hello!")
        assert (answer.status_code, answer.headers["x-mm-generation"]) == (200, f"{NAME}/{number}")
        assert answer.json()["choices"][0]["message"]["content"]
    large, small = play.ask(NAME, LONG), play.ask(f"{NAME}/2", LONG)
    assert large.status_code == 200, "its own engine has room for it"
    assert small.json()["error"]["code"] == "context_length_exceeded", "and the other one has not"

    client = site.key()
    assert site.answered(client, NAME) == f"{NAME}/1"
    refused = site.ask(client, f"{NAME}/2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    log = site.run("logs", f"{NAME}/2", "-n", "1000")
    assert log != site.run("logs", NAME, "-n", "1000")

    engine = {replica["uid"] for replica in engines(site, play) if replica["trial"]}
    live = site.json("activate", NAME, "2", "--reason", "it is enough")
    assert (live["state"], live["mode"]) == ("succeeded", "overlap")
    assert {replica["uid"] for replica in engines(site, play)} == engine, "no second start"
    assert site.answered(client, NAME) == f"{NAME}/2"
    assert site.json("trial", NAME)["ending"] == f"{NAME}/2 goes live with its engine"
    assert f"{NAME}/2" not in play.models()

    site.json("trial", NAME, "1")
    ended = site.json("trial", NAME, "--end")
    assert (ended["status"], ended["ending"]) == ("ended", "ended by admin")
    assert len(engines(site, play)) == 1
    site.run("stop", NAME, "--reason", "the test is over")


def engines(site: Installation, play: Playground) -> list[dict[str, object]]:
    """The deployment's engines, as the API tells them."""
    found = play.client.get(f"{site.panel}/api/v1/deployments/{NAME}").json()["replicas"]
    assert isinstance(found, list)
    return found
