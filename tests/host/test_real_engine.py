"""The real llama-server and the real small model, under a real supervisor."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.catalog import engine
from mmadmin.core.engines.llama_server.flags import BY_NAME
from mmadmin.core.engines.protocol import Seat
from mmadmin.core.engines.system import read_system
from mmadmin.core.errors import ProbeFailed
from mmadmin.core.home import Home
from mmadmin.host import engine_process, process_tree
from mmadmin.host.drift import drift
from mmadmin.host.engine_client import EngineClient
from mmadmin.host.probe import liveness, require, run_probes, work
from mmadmin.host.readiness import wait_ready
from mmadmin.host.supervisor import Supervisor

pytestmark = pytest.mark.engine

SECRET = "canary-real-31b7"
PATIENCE_S = 120
OPTION_NAMES = re.compile(r"(?:--?[A-Za-z0-9][\w.-]*(?:,\s*|\s|$))+")
"""What a line of the server's help begins with."""
GOLDEN = Path(__file__).parents[1] / "core" / "engines" / "llama_server" / "golden"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An installation with a running supervisor."""
    home = Home(tmp_path_factory.mktemp("real"))
    supervisor = Supervisor(home)
    supervisor.launch()
    yield home
    supervisor.shutdown(30, lambda _line: None)


@pytest.fixture(scope="module")
def system(engine_store):
    """The system that the catalog's small deployment is built to."""
    return read_system(engine_store.path("system"))


@pytest.fixture(scope="module")
def live(home, system):
    """It runs, and has proved itself: launch and what was proved."""
    made = launch(home, "live", system)
    engine_process.start(home, "live", made, SECRET)
    ready = wait_ready(home, "live", made, SECRET)
    yield made, ready
    engine_process.stop(home, "live")
    assert process_tree.listener(made.socket) is None


def launch(home, uid, system, **options):
    """The system's launch for a replica, with some options changed."""
    changed = replace(system, options=replace(system.options, **options))
    made = engine(system.engine_kind).launch(changed, Seat(str(home.engine_socket(uid))))
    return replace(made, readable=[str(part) for part in system.parts.values()])


def with_part(system, **parts):
    """The system with some parts changed."""
    return replace(system, parts={**system.parts, **parts})


def test_it_proves_itself(live, system):
    """Process, secret, alias, file, slots, context and a completion, as planned."""
    _made, ready = live
    assert ready.alias == "smollm2-135m"
    assert ready.model_path == str(system.parts["model"])
    assert (ready.slots, ready.context_per_slot) == (2, 4096)
    assert ready.completion.strip()


def test_it_shows_what_it_can_do(live):
    """Every row is answered; stream and template pass; its template knows no tools."""
    made, ready = live
    report = run_probes(made, SECRET, ready, required=["stream", "template.plain", "speed"])
    require(report)
    states = {row.name: row.state for row in report.rows}
    assert {states[name] for name in states if name.startswith("template.effort")} == {"passed"}
    assert states["tool-call"] == "skipped"
    assert report.measured["generation_tokens_per_s_milli"] > 0
    liveness(made, SECRET)
    json.dumps(report.as_json())


def test_it_tells_how_far_its_requests_are(live):
    """The mark moves with the tokens of a stream, and is gone with it."""
    made, _ready = live
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    assert work(made, SECRET) == ""
    with EngineClient(made, SECRET) as client:
        lines = client.lines("/v1/completions", body, timeout_s=PATIENCE_S)
        marks: set[str | None] = set()
        for _line in lines:
            marks.add(work(made, SECRET))
            if len(marks - {""}) > 1:
                break
        lines.close()
    assert len(marks - {"", None}) > 1
    give_up = time.monotonic() + PATIENCE_S
    while work(made, SECRET) != "" and time.monotonic() < give_up:
        time.sleep(0.05)
    assert work(made, SECRET) == ""


def test_nothing_drifts_and_a_deleted_file_is_seen(live, home, system, engine_store):
    """The engine runs from sealed files by the command that was planned."""
    made, _ready = live
    store = engine_store.store
    assert drift(home, "live", made, system=system, secret=SECRET, store=store) == []


def test_the_secret_is_wanted_on_every_endpoint(live):
    """Only health answers without it."""
    made, _ready = live
    with EngineClient(made, SECRET) as client:
        for path in ("/v1/models", "/props", "/slots"):
            assert client.get(path, wrong_secret=True).status_code == 401, path
        assert client.get("/health", wrong_secret=True).status_code == 200


def test_a_model_that_cannot_be_loaded_fails_with_the_engines_words(home, system, tmp_path):
    """Not after the deadline: at once, and with the reason."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(system.parts["model"].read_bytes()[:100_000])
    made = launch(home, "broken", with_part(system, model=broken))
    with pytest.raises(ProbeFailed, match="ended") as failed:  # noqa: PT012 (either sees it)
        engine_process.start(home, "broken", made, SECRET)  # or it is quicker than we look
        wait_ready(home, "broken", made, SECRET)
    assert any("broken.gguf" in line for line in failed.value.details["log_tail"])
    engine_process.stop(home, "broken")


def test_a_context_that_the_engine_caps_is_refused(home, system):
    """Asked for more than the model was trained with, behind the checks' back."""
    made = launch(home, "capped", system, slots=1)
    argv = [word if word != "4096" else "16384" for word in made.argv]
    made = replace(made, argv=argv, expect=replace(made.expect, context_per_slot=16384))
    engine_process.start(home, "capped", made, SECRET)
    with pytest.raises(ProbeFailed, match="8192 tokens of context, planned were 16384"):
        wait_ready(home, "capped", made, SECRET)
    engine_process.stop(home, "capped")


def test_slots_of_a_unified_cache_share_the_whole_context(home, system):
    """The engine shows all of it for each slot, as planned."""
    made = launch(home, "unified", system, slots=2, context=1024, kv_unified=True)
    engine_process.start(home, "unified", made, SECRET)
    ready = wait_ready(home, "unified", made, SECRET)
    assert (ready.slots, ready.context_per_slot) == (2, 2048)
    engine_process.stop(home, "unified")


@pytest.mark.parametrize(("context", "shown"), [(4096, 8192), (8192, 8192)])
def test_a_unified_context_is_capped_as_planned(home, system, context, shown):
    """No slot shows more than the model was trained with."""
    made = launch(home, "whole", system, slots=2, context=context, kv_unified=True)
    engine_process.start(home, "whole", made, SECRET)
    assert wait_ready(home, "whole", made, SECRET).context_per_slot == shown
    engine_process.stop(home, "whole")


def test_a_template_of_the_deployment_is_the_one_that_is_used(home, system, tmp_path):
    """The engine shows the very text of the file."""
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\n"
    )
    made = launch(home, "own", with_part(system, template=template), slots=1, context=512)
    engine_process.start(home, "own", made, SECRET)
    assert wait_ready(home, "own", made, SECRET).completion
    engine_process.stop(home, "own")


def test_the_table_of_options_is_the_servers_own(engine_store):
    """What its help names and we know is the same list."""
    done = subprocess.run(
        [str(engine_store.server), "--help"], capture_output=True, text=True, check=True
    )
    heads = [head[0] for line in done.stdout.splitlines() if (head := OPTION_NAMES.match(line))]
    said = {word[2:] for head in heads for word in re.split(r"[,\s]+", head) if word[:2] == "--"}
    assert set(BY_NAME) - said == set()
    negatives = {name for name in said if name.startswith("no-")}
    assert said - set(BY_NAME) - negatives == set()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_the_server_understands_every_golden_command(engine_store, tmp_path, path):
    """It gets as far as missing the model file: no option is refused."""
    argv = json.loads(path.read_text(encoding="utf-8"))["argv"]
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    real = {
        "/run/engine.sock": str(tmp_path / "engine.sock"),
        "/store/engine/bin/llama-server": str(engine_store.server),
        "/store/template/chat_template.jinja": str(template),
        "/store/mmproj/mmproj.gguf": str(tmp_path / "missing-mmproj.gguf"),
        "/store/model/model.gguf": str(tmp_path / "missing.gguf"),
    }
    done = subprocess.run(
        [real.get(word, word) for word in argv],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "missing" in said, said[-2000:]
    assert "invalid" not in said, said[-2000:]
    assert "error while handling argument" not in said, said[-2000:]
