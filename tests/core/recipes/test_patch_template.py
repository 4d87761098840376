"""patch-template: the recipe on small templates, and on the real Mistral one in a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion

from mmadmin.core.build.recipe import Json
from mmadmin.core.canonical import parse
from mmadmin.core.chat_templates import patches as templates_room
from mmadmin.core.chat_templates.patches import PatchFails, conversations
from mmadmin.core.engines.llama_server.questions import is_same_template
from mmadmin.core.errors import InvalidDerivation
from mmadmin.core.recipes.patch_template import OUTPUT, RECIPE, rendering_of
from tests.support.engine import EngineStore
from tests.support.server import running_server
from tests.support.tools import attempt

LENIENT: dict[str, Json] = {"patches": [{"kind": "reasoning-effort-lenient"}]}
REFUSAL = 'reasoning_effort must be either "none" or "high"'


def mistral_template() -> str:
    """Mistral's own v15 template, as its library generates it."""
    return generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion.v15,
        image_support=True,
        audio_support=False,
        thinking_support=True,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=frozenset({"reasoning_effort"}),
        reasoning_effort_values=("none", "high"),
        reasoning_effort_default="none",
    )


def input_object(folder: Path, template: str) -> Path:
    """An object folder with a template."""
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def report_of(out: Path) -> dict[str, dict[str, Json]]:
    """The rendering report's rows by conversation."""
    report = parse((out / "rendering.json").read_bytes())
    assert isinstance(report, dict)
    rows = report["rows"]
    assert isinstance(rows, list)
    return {str(row["conversation"]): row for row in rows if isinstance(row, dict)}


def test_mistrals_template_patched_accepts_every_effort(tmp_path: Path) -> None:
    """The whole matrix before and after: what failed renders, none stays none, the rest is equal."""
    before = mistral_template()
    source = input_object(tmp_path / "in", before)
    work = attempt(tmp_path / "work")
    out = work.build(RECIPE, LENIENT, template=source)
    patched = (out / "chat_template.jinja").read_text()
    assert patched.endswith(before)
    rows = report_of(out)
    assert set(rows) == set(conversations())
    for effort in ("low", "medium", "bogus"):
        row = rows[f"effort-{effort}"]
        assert row["before"]["ok"] is False  # type: ignore[index,call-overload]
        assert REFUSAL in row["before"]["text"]  # type: ignore[index,call-overload,operator]
        assert row["after"] == rows["effort-high"]["after"]
    assert rows["effort-high"]["changed"] is False
    assert rows["effort-none"]["changed"] is False
    assert rows["plain"]["after"] == rows["effort-high"]["after"]
    assert rows["thinking-off"]["after"] == rows["effort-none"]["after"]
    assert rows["plain"]["before"] == rows["effort-none"]["before"]
    again = attempt(tmp_path / "again").build(RECIPE, LENIENT, template=source)
    assert (again / "rendering.json").read_bytes() == (out / "rendering.json").read_bytes()
    assert "of 15 conversations render otherwise" in work.log


def test_the_seeds_patch_as_it_was_printed_is_refused(tmp_path: Path) -> None:
    """`{#-` where `{%-` is meant: it does not compile, so it is no object."""
    printed = (
        "{#- if reasoning_effort is not defined or reasoning_effort is none %}\n"
        "{%- set reasoning_effort = 'high' %} {# was: 'none' #}\n"
        "{%- endif %}\n"
    )
    template = mistral_template()
    head = template.splitlines()[0]
    params: dict[str, Json] = {
        "patches": [{"kind": "unified-diff", "diff": diff_before(head, printed)}]
    }
    work = attempt(tmp_path / "work")
    with pytest.raises(PatchFails, match="syntax error"):
        work.build(RECIPE, params, template=input_object(tmp_path / "in", template))
    assert not list(work.out.iterdir())


def diff_before(head: str, text: str) -> str:
    """A diff that puts lines before a template's first line."""
    added = text.splitlines()
    lines = [f"@@ -1,1 +1,{len(added) + 1} @@", *(f"+{line}" for line in added), f" {head}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1500000000 }}",
    ],
)
def test_a_template_that_hangs_or_eats_memory_is_refused(bomb: str, tmp_path: Path) -> None:
    """jinja2's sandbox stops neither; the child's limits do, and the words say so."""
    quick = replace(templates_room.LIMITS, time_s=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates_room, "LIMITS", quick)
        with pytest.raises(PatchFails):
            attempt(tmp_path / "work").build(
                RECIPE, LENIENT, template=input_object(tmp_path / "in", bomb)
            )


def test_wrong_params_are_refused() -> None:
    """Patches are checked before there is a template."""
    for params, words in (
        ({}, "lacks patches"),
        ({"patches": []}, "a list of patches"),
        ({"patches": [{"kind": "sed"}]}, r"patches\[0\]\.kind"),
    ):
        with pytest.raises(InvalidDerivation, match=words):
            RECIPE.check(params)  # type: ignore[arg-type]


# --- the real server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real template and the patched one, as files."""
    folder = tmp_path_factory.mktemp("templates")
    source = input_object(folder / "in", mistral_template())
    out = attempt(folder / "work").build(RECIPE, LENIENT, template=source)
    return {
        "unpatched": source / "chat_template.jinja",
        "patched": out / "chat_template.jinja",
    }


def server(engine_store: EngineStore, template: Path, log: Path) -> Iterator[httpx2.Client]:
    """A real llama-server with this template."""
    with running_server(
        engine_store.server,
        engine_store.model,
        log,
        *("--jinja", "--chat-template-file", str(template)),
        *("--ctx-size", "2048", "--parallel", "1", "--threads", "2", "--no-warmup"),
    ) as client:
        yield client


@pytest.fixture(scope="module")
def patched(
    engine_store: EngineStore, templates: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    """The server with the patched template."""
    yield from server(engine_store, templates["patched"], tmp_path_factory.mktemp("p") / "log")


def chat(
    client: httpx2.Client, path: str = "/v1/chat/completions", **extra: Json
) -> httpx2.Response:
    """One short question."""
    messages: list[Json] = [{"role": "user", "content": "What is 17 * 23?"}]
    return client.post(
        path, json={"messages": messages, "max_tokens": 4, "temperature": 0, **extra}
    )


@pytest.mark.engine
def test_the_server_serves_the_template_that_was_planned(
    patched: httpx2.Client, templates: dict[str, Path]
) -> None:
    """It switches a condition of Mistral's off; that is the planned template, the other is not."""
    served = str(patched.get("/props").json()["chat_template"])
    assert is_same_template(served, templates["patched"].read_text())
    assert not is_same_template(served, templates["unpatched"].read_text())


@pytest.mark.engine
def test_the_unpatched_template_fails_as_the_seed_says(
    engine_store: EngineStore, templates: dict[str, Path], tmp_path: Path
) -> None:
    """500 with the template's own words for "low"; none and high are answered."""
    for client in server(engine_store, templates["unpatched"], tmp_path / "log"):
        refused = chat(client, reasoning_effort="low")
        assert refused.status_code == 500
        assert REFUSAL in refused.json()["error"]["message"]
        assert chat(client, reasoning_effort="high").status_code == 200
        assert chat(client, reasoning_effort="none").status_code == 200


@pytest.mark.engine
@pytest.mark.parametrize("effort", [None, "low", "medium", "high", "none", "nonsense"])
@pytest.mark.parametrize("place", ["top", "kwargs"])
def test_the_patched_template_answers_for_every_effort(
    patched: httpx2.Client, effort: str | None, place: str
) -> None:
    """Omitted, low, medium, high, none, nonsense; none alone switches reasoning off."""
    extra: dict[str, Json] = {}
    if effort is not None:
        extra = {"reasoning_effort": effort}
        if place == "kwargs":
            extra = {"chat_template_kwargs": extra}
    answer = chat(patched, **extra)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    prompt = chat(patched, "/apply-template", **extra).json()["prompt"]
    wanted = "none" if effort == "none" else "high"
    assert f'"reasoning_effort": "{wanted}"' in prompt


def test_the_report_beside_a_template(tmp_path: Path) -> None:
    """A patched template has its report beside it; one that nobody patched has none."""
    plain = input_object(tmp_path / "in", "{{ messages }}")
    assert rendering_of(plain / OUTPUT) is None
    (plain / "rendering.json").write_bytes(b'{"format":1}')
    assert rendering_of(plain / OUTPUT) == {"format": 1}
