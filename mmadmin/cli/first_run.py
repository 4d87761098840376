"""The first run: the small model from the catalog, built, served, keyed and asked one question.

What it has reached is kept in `MM_HOME/first-run.json`, so that an interrupted first run goes on
where it was. It never touches an installation that has deployments of its own.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from deployments import actions
from deployments.models import Build, Deployment, Generation
from mmadmin.cli.follow import follow_activation, follow_to_live
from mmadmin.cli.installation import CHECKOUT, gate_url, public_gate_url
from mmadmin.cli.output import console, escape
from mmadmin.cli.records import actor, on_host
from mmadmin.core.errors import Unreachable
from mmadmin.core.generations.lifecycle import ENDED, JobState
from mmadmin.core.home import Home, Ports

CATALOG = CHECKOUT / "deployments" / "catalog"
DEMO = "smollm2-135m"
QUESTION = "What is 17 * 23?"
REASON = "first run"
ANSWER_DEADLINE_S = 120.0
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the first run ends with."""

    deployment: str
    model: str
    generation: str
    key: str
    key_id: str
    question: str
    answer: str
    tokens_per_s: float

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        names = Outcome.__dataclass_fields__
        return {name: getattr(self, name) for name in names}


def run(home: Home, ports: Ports, *, quiet: bool) -> Outcome | None:
    """Do or finish the first run; None when there is nothing (more) to do."""
    state = remembered_state(home)
    if state.get("done") or (not state and Deployment.objects.exists()):
        return None
    remember_state(home, {"deployment": DEMO, "done": False})
    if not quiet:
        console.print(
            f"\nThe first deployment, [bold]{DEMO}[/]: its engine is compiled from source unless"
            " the store has it, which takes minutes.\n"
            "You may interrupt it: `make up` continues where it stopped.\n"
        )
    deployment = _bring_live(quiet=quiet)
    outcome = ask(deployment, ports)
    remember_state(home, {"deployment": DEMO, "done": True})
    return outcome


def _bring_live(*, quiet: bool) -> Deployment:
    """Deploy the demo, or take up what an earlier run began; returns it with a live generation."""
    person = actor()
    deployment = Deployment.objects.filter(name=DEMO).first()
    if deployment is None or not deployment.generations.exists():
        spec = (CATALOG / f"{DEMO}.toml").read_text(encoding="utf-8")
        generation = actions.deploy(person, spec, reason=REASON, on_host=on_host())
    elif deployment.live is not None:
        return deployment
    else:
        generation = deployment.generations.order_by("-number")[0]
    _finish(generation, quiet=quiet)
    return Deployment.objects.select_related("live").get(name=DEMO)


def _finish(generation: Generation, *, quiet: bool) -> None:
    person = actor()
    activation = generation.activations.order_by("-id").first()
    if activation is not None and JobState(activation.state) not in ENDED:
        follow_activation(activation.pk, quiet=quiet)
        return
    if generation.system:
        name = generation.deployment.name
        again = actions.activate(person, name, generation.number, reason=REASON)
        follow_activation(again.pk, quiet=quiet)
        return
    build: Build = generation.builds.order_by("-id")[0]
    if JobState(build.state) in ENDED:
        build = actions.retry_build(person, build.pk)
    follow_to_live(build.pk, quiet=quiet)


def ask(deployment: Deployment, ports: Ports) -> Outcome:
    """Issue a key and ask the question with it, through the gate."""
    key, text = actions.issue_key(
        actor(), owner="first run", note="made by mm up", deployments=[deployment.name]
    )
    body = {
        "model": deployment.public_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    answer = _post(f"{gate_url(ports)}/v1/chat/completions", text, body)
    reply = answer.json()
    timings = reply.get("timings") or {}
    return Outcome(
        deployment=deployment.name,
        model=deployment.public_name,
        generation=answer.headers.get("x-mm-generation", ""),
        key=text,
        key_id=key.key_id,
        question=QUESTION,
        answer=str(reply["choices"][0]["message"]["content"]).strip(),
        tokens_per_s=round(float(timings.get("predicted_per_second", 0.0)), 1),
    )


def _post(url: str, key: str, body: dict[str, Any]) -> httpx2.Response:
    """Ask the gate; patient for the moment until it knows the new key and route."""
    give_up = time.monotonic() + ANSWER_DEADLINE_S
    while True:
        try:
            answer = httpx2.post(
                url,
                json=body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=ANSWER_DEADLINE_S,
                trust_env=False,
            )
        except httpx2.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        else:
            if answer.status_code == httpx2.codes.OK:
                return answer
            failure = f"HTTP {answer.status_code}: {answer.text[:300]}"
        if time.monotonic() > give_up:
            raise Unreachable(
                f"the gate does not answer the first question: {failure}",
                remedy="read the gate's log: mm logs gate",
            )
        time.sleep(0.5)


def curl_line(outcome: Outcome, ports: Ports) -> str:
    """A line that can be pasted into a shell."""
    body = {
        "model": outcome.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,  # a model this small does not always come to an end
    }
    return (
        f"curl -s {public_gate_url(ports)}/v1/chat/completions "
        f"-H {shlex.quote(f'Authorization: Bearer {outcome.key}')} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def show(outcome: Outcome, ports: Ports) -> None:
    """Print question, answer, key and the curl line."""
    console.print()
    console.print(f"[bold]{QUESTION}[/]  →  {escape(outcome.answer)}")
    console.print(
        f"[dim]{escape(outcome.model)}, generation {escape(outcome.generation)}, "
        f"{outcome.tokens_per_s} tokens/s. A model this small answers fast, not correctly.[/]"
    )
    shown = "[yellow](shown only now)[/]"
    console.print(f"\nkey     [bold]{outcome.key}[/]  {shown}", soft_wrap=True)
    console.print("try     ", end="")
    console.print(curl_line(outcome, ports), soft_wrap=True, markup=False)


def remembered_state(home: Home) -> dict[str, Any]:
    """What the first run has reached, from `MM_HOME/first-run.json`."""
    path = home.root / "first-run.json"
    if not path.exists():
        return {}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def remember_state(home: Home, state: dict[str, Any]) -> None:
    """Write `MM_HOME/first-run.json` by rename."""
    path = home.root / "first-run.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state), encoding="utf-8")
    fresh.replace(path)
