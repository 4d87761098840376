"""python-env: wheels become one tree, the same bytes each time, and nothing that is not theirs."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.environments import (
    Environment,
    Package,
    command,
    environment_from_json,
    interpreter,
    isolated_python,
    package_changes,
    python_program,
    read_environment,
    script,
    variables,
)
from mmadmin.core.errors import DigestMismatch, InvalidDerivation, InvalidInput, ToolMissing
from mmadmin.core.recipes.python_env import RECIPE, Overlay, derivation
from mmadmin.core.recipes.unpack import HostileArchive
from mmadmin.core.spec.lock import Lock, lock_as_json, lock_from_json
from mmadmin.core.store import Store
from tests.core.workshop import damage, in_child
from tests.support.engine import toolbox_for
from tests.support.tools import NoTools
from tests.support.wheels import locked, wheel

PARAMS = {"interpreter": interpreter(), "requirements": ["alpha"]}
INIT = b"VALUE = 1\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def build(folder: Path, *wheels: Path, **params: object) -> Path:
    """The environment of these wheels, without a store."""
    inputs = {}
    for path in wheels:
        inputs[path.name.partition("-")[0]] = path.parent
    wanted = {**PARAMS, **params}
    RECIPE.check(wanted)  # type: ignore[arg-type]
    out = folder / "out"
    out.mkdir(parents=True)
    RECIPE.build(wanted, inputs, out, NoTools(folder))  # type: ignore[arg-type]
    return out


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Path → content and executable bit."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(environment: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines of Python in an environment."""
    argv = [*command("x")[:-2], "-c", code]
    env = {**variables(environment), "PYTHONDONTWRITEBYTECODE": "1", **more}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_files_lie_where_target_puts_them_and_run(tmp_path: Path) -> None:
    """Library, data and programs; no bytecode, no scripts of an interpreter, no headers."""
    files = {
        "alpha/__init__.py": INIT,
        "alpha/__pycache__/x.cpython-311.pyc": b"x",
        "alpha-1.0.data/platlib/alpha/lib.so": b"so",
        "alpha-1.0.data/data/share/alpha.txt": b"data",
        "alpha-1.0.data/scripts/tool": b"#!/bin/sh\n",
        "alpha-1.0.data/scripts/entry": b"#!python\nimport alpha\n",
        "alpha-1.0.data/headers/a.h": b"h",
    }
    made = wheel(tmp_path / "w", "alpha", files, executable=("alpha-1.0.data/scripts/tool",))
    out = build(tmp_path, made)
    found = tree(out / "site")
    assert set(found) == {
        *("alpha/__init__.py", "alpha/lib.so", "share/alpha.txt", "bin/tool"),
        *("sitecustomize.py", "alpha-1.0.dist-info/METADATA", "alpha-1.0.dist-info/RECORD"),
    }
    assert found["bin/tool"][1]
    assert not found["alpha/lib.so"][1]
    seen = run(
        out, "import alpha, sys; print(alpha.VALUE, [p for p in sys.path if 'packages' in p])"
    )
    assert seen.stdout == "1 []\n", seen.stderr


HOSTILE = "import os; os.write(2, b'the host was here')"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose Python runs a `.pth` file at start; mmadmin's environment is made from it."""
    host = tmp_path / "host"
    venv.EnvBuilder(symlinks=True).create(host)
    folder = host / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
    (folder / "hostile.pth").write_text(HOSTILE + "\n")
    program = host / "bin" / python_program().name
    monkeypatch.setattr("mmadmin.core.environments.python_program", lambda: program)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "ours"))
    (tmp_path / "ours").mkdir()
    return program


def test_pth_files_of_the_host_are_not_run(hostile: Path, tmp_path: Path) -> None:
    """Neither in a module of the environment, nor in a program that it starts."""
    start = (
        b"import subprocess, sys\n"
        b"subprocess.run([sys.executable, '-c', 'import alpha'], check=True)\n"
        b"print(*sys.argv[1:])\nexit(3)\n"
    )
    out = build(tmp_path, wheel(tmp_path / "w", "alpha", {"alpha.py": INIT, "start.py": start}))
    env = {**variables(out), "PYTHONDONTWRITEBYTECODE": "1"}
    plain = subprocess.run(
        [hostile, "-P", "-s", "-m", "start"], env=env, capture_output=True, check=False
    )
    assert plain.stderr.count(b"the host was here") > 1, "the test itself works"
    for argv in (command("start", "-x"), script(out / "site" / "start.py", "-x")):
        done = subprocess.run(argv, env=env, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (3, b"-x\n", b"")


def test_two_that_make_the_isolated_python_at_once_share_one(hostile: Path) -> None:
    """Whoever comes second leaves nothing."""
    with ThreadPoolExecutor(8) as pool:
        made = {one.result() for one in [pool.submit(isolated_python) for _ in range(8)]}
    [program] = made
    assert [path.name for path in program.parents[2].iterdir()] == ["isolated"]
    assert program.resolve() == hostile.resolve()


def test_without_a_virtual_environment_the_remedy_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mmadmin writes nothing into the system's Python."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(ToolMissing) as caught:
        isolated_python()
    assert "-m venv --without-pip" in caught.value.remedy


def test_another_interpreter_is_refused_at_start(tmp_path: Path) -> None:
    """With its own exit code, and both names."""
    made = wheel(tmp_path / "w", "alpha", {"alpha.py": INIT})
    out = build(tmp_path, made, interpreter="cpython-3.99-linux-x86_64")
    done = run(out, "print('started')")
    assert (done.returncode, done.stdout) == (78, "")
    assert "cpython-3.99" in done.stderr
    assert interpreter() in done.stderr


def test_the_listing_says_what_is_there_and_why(tmp_path: Path) -> None:
    """Versions, licences, sizes; the chain from what was asked for; extras count when wanted."""
    needs = "Requires-Dist: Beta.X[fast]>=1\nLicense-Expression: MIT\n"
    beta = "Requires-Dist: gamma; extra == 'fast'\nRequires-Dist: delta; extra == 'slow'\n"
    other = "Classifier: License :: OSI Approved :: BSD License\n"
    wheels = [
        wheel(tmp_path / "a", "alpha", {"alpha.py": INIT}, metadata=needs),
        wheel(tmp_path / "b", "beta_x", {"beta.py": INIT}, metadata=beta),
        wheel(tmp_path / "c", "gamma", {"gamma.py": INIT}, metadata=other),
        wheel(tmp_path / "d", "delta", {"delta.py": INIT}),
    ]
    out = build(tmp_path, *wheels)
    found = read_environment(out)
    assert found is not None
    assert [p.name for p in found.packages] == ["alpha", "beta-x", "delta", "gamma"]
    licences = {p.name: p.licence for p in found.packages}
    assert (licences["alpha"], licences["gamma"]) == ("MIT", "BSD License")
    assert found.why("gamma") == ["alpha", "beta-x", "gamma"]
    assert found.why("delta") == []
    assert found.needed_by("beta_x") == ["alpha"]
    assert found.needed_by("alpha") == [""]
    assert found.size_bytes == sum(p.size_bytes for p in found.packages) > 0
    bill = json.loads((out / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"], len(bill["components"])) == (
        *("CycloneDX", "1.6"),
        4,
    )
    assert {"ref": "pkg:pypi/alpha@1.0", "dependsOn": ["pkg:pypi/beta-x@1.0"]} in bill[
        "dependencies"
    ]
    assert read_environment(tmp_path) is None


def test_a_file_of_two_wheels_is_kept_from_the_first_and_named(tmp_path: Path) -> None:
    """Equal bytes are no clash."""
    one = wheel(tmp_path / "a", "alpha", {"shared.py": b"1", "same.py": b"s"})
    two = wheel(tmp_path / "b", "beta", {"shared.py": b"2", "same.py": b"s"})
    out = build(tmp_path, two, one)
    assert (out / "site/shared.py").read_bytes() == b"1"
    found = read_environment(out)
    assert found is not None
    assert found.clashes == ({"file": "shared.py", "kept": "alpha", "dropped": "beta"},)


def overlay(before: bytes, after: bytes, file: str) -> dict[str, str]:
    """An overlay that turns one text into the other."""
    lines = difflib.unified_diff(
        before.decode().splitlines(keepends=True), after.decode().splitlines(keepends=True)
    )
    digest = hashlib.sha256(before).hexdigest() if before else ""
    return {"file": file, "sha256": digest, "diff": "".join(lines), "reason": "a test"}


def test_overlays_correct_and_add_files(tmp_path: Path) -> None:
    """By a diff against one very file; the listing says why."""
    made = wheel(tmp_path / "w", "alpha", {"alpha.py": b"a\nb\nc\n"})
    wanted = [
        overlay(b"a\nb\nc\n", b"a\nB\nc\n", "alpha.py"),
        overlay(b"", b"new\nfile\n", "more/new.py"),
    ]
    out = build(tmp_path, made, overlays=wanted)
    assert (out / "site/alpha.py").read_bytes() == b"a\nB\nc\n"
    assert (out / "site/more/new.py").read_bytes() == b"new\nfile\n"
    found = read_environment(out)
    assert found is not None
    assert found.overlays[0] == {"file": "alpha.py", "reason": "a test"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sha256": "0" * 64}, DigestMismatch),
        ({"sha256": ""}, DigestMismatch),
        ({"file": "none.py"}, DigestMismatch),
        ({"diff": "@@ -1 +1 @@\n-x\n+y\n"}, InvalidDerivation),
        ({"file": "../alpha.py"}, InvalidDerivation),
        ({"reason": ""}, InvalidDerivation),
    ],
)
def test_an_overlay_for_another_file_is_refused(
    tmp_path: Path, change: dict[str, str], error: type[Exception]
) -> None:
    """Another version of the package needs another overlay."""
    made = wheel(tmp_path / "w", "alpha", {"alpha.py": b"a\n"})
    with pytest.raises(error):
        build(tmp_path, made, overlays=[{**overlay(b"a\n", b"b\n", "alpha.py"), **change}])


@pytest.mark.parametrize(
    ("files", "record", "error"),
    [
        ({"../evil.py": b"x"}, None, HostileArchive),
        ({"/evil.py": b"x"}, None, HostileArchive),
        ({"a": b"x", "a/b.py": b"x"}, None, HostileArchive),
        ({"a.py": b"x"}, "a.py,sha256=AAAA,1\n", InvalidInput),
        ({"a.py": b"x"}, f"a.py,sha256={'A' * 43},9\n", DigestMismatch),
        ({"a.py": b"x"}, "a.py,sha256=*,1\n", InvalidInput),
    ],
)
def test_a_hostile_or_damaged_wheel_is_refused(
    tmp_path: Path, files: dict[str, bytes], record: str | None, error: type[Exception]
) -> None:
    """No path out of the tree, and no file that RECORD does not vouch for."""
    with pytest.raises(error):
        build(tmp_path, wheel(tmp_path / "w", "alpha", files, record=record))
    assert not (tmp_path / "evil.py").exists()


def test_what_is_not_a_wheel_is_refused(tmp_path: Path) -> None:
    """A text, and an archive without metadata."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "alpha-1.0-py3-none-any.whl").write_text("no")
    with pytest.raises(InvalidInput):
        build(tmp_path, tmp_path / "w" / "alpha-1.0-py3-none-any.whl")


@pytest.mark.parametrize(
    "change",
    [{"interpreter": "3.11"}, {"interpreter": None}, {"overlays": "x"}, {"unknown": 1}],
)
def test_bad_params_are_refused(change: dict[str, object]) -> None:
    """By name."""
    with pytest.raises(InvalidDerivation):
        RECIPE.check({**PARAMS, **change})  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,6}(/[a-z]{1,6}){0,2}\.py", fullmatch=True), st.binary(max_size=64)
    )
)
def test_every_file_of_a_wheel_arrives_with_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    """Whatever its name and content."""
    folder = tmp_path_factory.mktemp("any")
    files.pop("sitecustomize.py", None)
    out = build(folder, wheel(folder / "w", "alpha", files))
    found = tree(out / "site")
    assert {path: found[path][0] for path in files} == files


def realised(store: Store, lock: Lock, *overlays: Overlay, **options: object) -> str:
    """Build the environment of a lock by the real toolbox; the object's name."""
    goal = derivation(lock, "engine", ["alpha"], overlays)
    return realise(goal, store, toolbox_for(store, **options), UNOBSERVED).object


def test_the_same_bytes_twice_and_shared_with_another(store: Store, tmp_path: Path) -> None:
    """One object whoever builds it; a second environment links what it has in common."""
    big = wheel(tmp_path / "w", "alpha", {"alpha.py": INIT, "alpha.bin": bytes(100_000)})
    lock = locked(big)
    first = realised(store, lock)
    assert realised(Store(tmp_path / "other", floor_bytes=0), lock) == first
    more = wheel(tmp_path / "v", "beta", {"beta.py": INIT})
    second = realised(store, locked(big, more))
    assert second != first
    paths = [store.object_path(name) / "site/alpha.bin" for name in (first, second)]
    assert os.path.samestat(*(path.stat() for path in paths))
    mended = Overlay(**overlay(INIT, b"VALUE = 2\n", "alpha.py"))
    third = realised(store, lock, mended)
    texts = [(store.object_path(name) / "site/alpha.py").read_bytes() for name in (first, third)]
    assert texts == [INIT, b"VALUE = 2\n"]
    assert damage(store) == []


def killed_at(store: Store, lock: Lock, package: str) -> Callable[[], None]:
    """Build, and die when the environment's step comes to a package."""

    def work() -> None:
        def log(derivation: object, staging: object, path: Path) -> object:
            tools = toolbox_for(store)(derivation, staging, path)  # type: ignore[arg-type]
            plain = tools.log_sink

            def sink(line: str) -> None:
                plain(line)
                if line.startswith(f"installing {package} "):
                    os.kill(os.getpid(), signal.SIGKILL)

            tools.log_sink = sink
            return tools

        realise(derivation(lock, "engine", ["alpha"]), store, log, UNOBSERVED)  # type: ignore[arg-type]

    return work


def test_a_killed_build_leaves_no_environment_and_the_next_one_goes_on(
    store: Store, tmp_path: Path
) -> None:
    """SIGKILL between two packages: no object, no half tree; then the same object as elsewhere."""
    wheels = [wheel(tmp_path / name, name, {f"{name}.py": INIT}) for name in ("alpha", "beta")]
    lock = locked(*wheels)
    assert in_child(killed_at(store, lock, "beta")) == -signal.SIGKILL
    assert not [name for name in store.names() if name.endswith("-environment")]
    found = realised(store, lock)
    assert found == realised(Store(tmp_path / "other", floor_bytes=0), lock)
    assert damage(store) == []


def test_a_lock_keeps_the_interpreter_and_reads_as_before(tmp_path: Path) -> None:
    """It names it only where there is an environment."""
    lock = locked(wheel(tmp_path, "alpha", {"alpha.py": INIT}))
    assert lock_from_json(lock_as_json(lock)) == lock
    assert "interpreters" not in lock_as_json(Lock({}))
    with pytest.raises(InvalidInput):
        derivation(Lock(lock.pins), "engine", ["alpha"])
    goal = derivation(lock, "engine", ["alpha"])
    assert set(goal.inputs) == {"alpha"}
    assert goal.inputs["alpha"].recipe == "fetch"


def test_changes_between_two_environments_by_package() -> None:
    """Added, gone, changed; nothing for what is equal."""
    found = list(package_changes({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}))
    assert [(one.name, one.before, one.after) for one in found] == [
        *(("b", "1", "2"), ("c", "1", ""), ("d", "", "1"))
    ]


def test_a_damaged_listing_is_refused() -> None:
    """And an old wheel's odd requirement is passed over."""
    with pytest.raises(InvalidInput):
        environment_from_json({"packages": []})
    odd = Package("a", "1", "", 0, "a.whl", "0" * 64, ("b (>=1.0,<2.0", "c"))
    others = [Package(name, "1", "", 0, f"{name}.whl", "0" * 64) for name in ("b", "c")]
    found = Environment(interpreter(), ("a",), (odd, *others))
    assert found.edges()["a"] == ("c",)
