"""The documentation says what the code does: links, commands, targets, settings, files."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mmadmin.cli.main import app
from mmadmin.core.catalog import engines, recipes
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.variables import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
VARIABLE = re.compile(
    r"\b(?:MM_[A-Z_]*[A-Z]|AWS_[A-Z0-9_]*[A-Z0-9]|DATABASE_URL|REDIS_URL|PUBLIC_ORIGIN"
    r"|HF_ENDPOINT|HF_TOKEN)\b"
)
OURS = ("mmadmin", "deployments", "scripts", "Makefile", ".ci/run", "docker-compose.yml")
OF_SUPERVISORD = {"MM_"}


def code_of(page: Path) -> str:
    """All code of a page, a line each."""
    found = CODE.findall(page.read_text(encoding="utf-8"))
    return "\n".join(block or inline for block, inline in found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of the repository, and to a heading in it, exists."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_reached_from_the_index() -> None:
    """Whoever begins at the index of the docs, or at the README, finds every page."""
    found = {ROOT / "README.md", ROOT / "docs" / "index.md"}
    todo = list(found)
    while todo:
        page = todo.pop()
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.exists() and file not in found:
                found.add(file)
                todo.append(file)
    assert not [str(page.relative_to(ROOT)) for page in PAGES if page not in found]


def command_at(words: list[str]) -> Any:
    """The `mm` command that the words name; None when there is none."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if not hasattr(command, "commands"):
            return command
        if word not in command.commands:
            return None
        command = command.commands[word]
    return command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_targets_exist(page: Path) -> None:
    """Every `mm …` with its options and every `make …` in a page is one that there is."""
    targets = re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in (full.split("#")[0].strip() for full in code_of(page).splitlines()):
        for target in re.findall(r"(?:^|&& |[A-Z_]+=\S+ )make ([a-z-]+)", line):
            assert target in targets or target.startswith("bench-"), f"{page.name}: make {target}"
        match = re.match(r"(?:[A-Z_]+=\S+ )*mm ((?:[a-z][a-z-]*(?: |$))+)(.*)", line)
        if match is None:
            continue
        command = command_at(match[1].split())
        assert command is not None, f"{page.name}: mm {match[1]}"
        known = {option for p in command.params for option in [*p.opts, *p.secondary_opts]}
        for option in re.findall(r"(?<=\s)(--[a-z-]+)", match[2]):
            assert option in known | {"--help"}, f"{page.name}: {line}"


def test_every_variable_that_the_code_reads_is_documented() -> None:
    """A setting that is not in the table of variables fails here, and so does a stale one."""
    read: set[str] = set()
    for name in OURS:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            compiled = file.parent.name == "__pycache__"  # written while others run
            if compiled or file.suffix in {".js", ".css"} or not file.is_file():
                continue
            if file.name == "variables.py":
                continue
            read |= set(VARIABLE.findall(file.read_text(encoding="utf-8")))
    plain = {name.removesuffix("_FILE") for name in read}
    assert plain <= set(VARIABLES), f"not documented: {sorted(plain - set(VARIABLES))}"
    # Secrets are read by their file's name, so their variables' names are nowhere in full.
    spelt = {f"MM_{name.upper()}" for name in ("django_secret_key", "key_pepper", "engine_master")}
    spelt |= {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"}  # by libraries
    assert set(VARIABLES) <= plain | spelt, f"read nowhere: {sorted(set(VARIABLES) - plain)}"


def test_pages_read_out_of_the_code_are_current() -> None:
    """Commands, settings and the deployment file are as `make docs` would write them."""
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", sorted(recipes()))
def test_every_recipe_has_its_page_and_its_test(kind: str) -> None:
    """Adding a recipe is one file, one test file and one page."""
    assert (ROOT / "docs" / "recipes" / f"{kind}.md").exists()
    tests = [p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py")]
    module = f"recipes.{kind.replace('-', '_')}"
    assert [t for t in tests if f'"{kind}"' in t or module in t], f"no test of {kind}"


@pytest.mark.parametrize("kind", sorted(engines()))
def test_every_engine_has_its_page(kind: str) -> None:
    """Adding an engine is one file, one test file and one page."""
    assert (ROOT / "docs" / "engines" / f"{kind}.md").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "deployments" / "catalog").glob("*.toml")))
def test_the_catalog_is_valid(path: Path) -> None:
    """Every deployment file of the catalog is accepted and named like its file, or nearly."""
    spec = parse_spec(path.read_text(encoding="utf-8"))
    assert path.stem.startswith(spec.name)


def test_toml_in_the_readme_is_a_deployment() -> None:
    """The example in the README would be accepted as it stands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        tomllib.loads(block)
        parse_spec(block)


def test_the_version_is_the_newest_of_the_changelog() -> None:
    """One source: `mm --version` says what CHANGELOG.md says."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    assert newest
    done = subprocess.run(
        [sys.executable, "-c", "from mmadmin.cli.entry import main; main()", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"mm {newest[1]}\n"


def test_requirements_name_no_index_and_have_hashes() -> None:
    """The locked files say what, never where from; base is a part of dev."""
    pins: dict[str, set[str]] = {}
    for name in ("base", "dev"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        assert not re.search(r"https?://|--index|--find-links|file:", text)
        entries = re.findall(r"^([a-z0-9][^\s=]*)==(\S+) \\\n +--hash=sha256:", text, re.MULTILINE)
        assert len(entries) == len(re.findall(r"^[a-z0-9]\S*==", text, re.MULTILINE))
        pins[name] = {f"{package}=={version}" for package, version in entries}
    assert pins["base"] <= pins["dev"]
