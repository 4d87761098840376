"""Set up `.venv`: check the machine, install the locked requirements, install mmadmin itself.

Standard library only, and written so that an old Python can still read it and say what is missing.
Each step is skipped when its stamp (a digest of what it was made from) still fits, so that a second
run takes a moment; an interrupted run leaves no stamp and is simply repeated.

    python3 scripts/setup.py            what `mm` needs (requirements/base.txt)
    python3 scripts/setup.py --dev      also what the tests need (requirements/dev.txt, a browser)
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
BASE = os.path.join("requirements", "base.txt")
DEV = os.path.join("requirements", "dev.txt")
LEAST = (3, 11)
QUIET_S = 2.0
"""A step that takes longer than this says how far it is."""
REPORT_EVERY_S = 5.0
"""How often it says so where the output is not a terminal."""

TOOLS = (
    ("g++", "g++", "the C++ compiler that builds the engine"),
    ("git", "git", "git"),
)


def fail(message):
    """Say what is wrong and end with 1."""
    sys.stderr.write("\n" + message + "\n")
    sys.exit(1)


class Step:
    """One step's line: what, how far, how long; rewritten in place on a terminal."""

    def __init__(self, what):
        self.what = what
        self.detail = ""
        self.began = time.monotonic()
        self.tty = sys.stdout.isatty()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._tick)
        self.thread.daemon = True

    def __enter__(self):
        self.thread.start()
        return self

    def _line(self):
        seconds = time.monotonic() - self.began
        detail = "  " + self.detail if self.detail else ""
        return "  {}{}  ({:.0f} s)".format(self.what, detail, seconds)

    def _tick(self):
        if self.over.wait(QUIET_S):
            return
        while True:
            if self.tty:
                width = shutil.get_terminal_size().columns
                sys.stdout.write("\r\033[K" + self._line()[: width - 1])
            else:
                sys.stdout.write(self._line() + "\n")
            sys.stdout.flush()
            if self.over.wait(0.2 if self.tty else REPORT_EVERY_S):
                return

    def __exit__(self, kind, value, trace):
        self.over.set()
        self.thread.join()
        mark = "done" if kind is None else "stopped"
        start = "\r\033[K" if self.tty else ""
        seconds = time.monotonic() - self.began
        sys.stdout.write("{}  {}: {} ({:.1f} s)\n".format(start, self.what, mark, seconds))
        sys.stdout.flush()


def digest(*paths):
    """sha256 over the named files of the checkout, its place, and this Python."""
    total = hashlib.sha256((sys.version + VENV).encode())
    for path in paths:
        with open(os.path.join(ROOT, path), "rb") as file:
            total.update(path.encode() + b"\0" + file.read())
    return total.hexdigest()


def stamped(name, value):
    """True when the step `name` was finished with just this input."""
    try:
        with open(os.path.join(VENV, name)) as file:
            return file.read() == value
    except OSError:
        return False


def stamp(name, value):
    """Remember that the step `name` is finished."""
    path = os.path.join(VENV, name)
    with open(path + ".new", "w") as file:
        file.write(value)
    os.replace(path + ".new", path)


def check_machine():
    """Refuse, in words, what cannot work: an old Python, no venv, no compiler, no git."""
    if sys.version_info < LEAST:
        fail(
            "mmadmin needs Python {}.{} or newer; this is {}.\n"
            "Debian 12: apt-get install python3 python3-venv\n"
            "Elsewhere: make up PYTHON=/path/to/python3.11".format(
                LEAST[0], LEAST[1], sys.version.split()[0]
            )
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            fail(
                "this Python has no module `{}`.\nDebian: apt-get install python3-venv".format(
                    module
                )
            )
    for program, package, what in TOOLS:
        if shutil.which(program) is None:
            fail("`{}` is missing: {}.\nDebian: apt-get install {}".format(program, what, package))


def run(argv, step, on_line=None):
    """Run a program; show its output only when it fails."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", PIP_NO_INPUT="1")
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    ) as child:
        lines = []
        try:
            for line in child.stdout:
                lines.append(line.rstrip())
                if on_line:
                    on_line(line)
        except BaseException:
            child.terminate()
            raise
        code = child.wait()
    if code:
        fail("{} failed with exit code {}:\n{}".format(step.what, code, "\n".join(lines[-25:])))


def usable():
    """True when `.venv` was made by hand, with this Python's version and a working pip."""
    test = "import pip, sys; sys.exit(sys.version_info[:2] != {})".format(sys.version_info[:2])
    try:
        return subprocess.call([VENV_PYTHON, "-c", test], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def make_venv():
    """`.venv` with a pip of its own."""
    value = digest()
    if stamped("mm-venv", value) and os.path.exists(VENV_PYTHON):
        return
    if usable():
        stamp("mm-venv", value)
        return
    with Step("a Python environment in .venv") as step:
        run([sys.executable, "-m", "venv", "--clear", VENV], step)
    stamp("mm-venv", value)


def install(path, name):
    """The locked requirements, each file checked against its hash; dev's include base's."""
    base, dev = digest(BASE), digest(BASE, DEV)
    value = dev if path == DEV else base
    if stamped(name, value) or stamped("mm-dev", dev):
        return
    with open(os.path.join(ROOT, path)) as file:
        total = sum(1 for line in file if line[0].isalnum() and "==" in line)
    found = []
    with Step("packages of {}".format(path)) as step:

        def on_line(line):
            first = line.split(" ", 1)[0]
            if first in ("Collecting", "Processing") or line.startswith("Requirement already"):
                found.append(first)
                package = line.split()[-1 if first == "Requirement" else 1]
                package = os.path.basename(package).split("==")[0].split("-")[0]
                step.detail = "{} of {}: {}".format(min(len(found), total), total, package)
            elif line.startswith("Installing collected"):
                step.detail = "{} found, unpacking".format(total)

        argv = [VENV_PYTHON, "-m", "pip", "install", "--no-deps", "--require-hashes"]
        argv += ["--disable-pip-version-check", "--progress-bar", "off", "-r", path]
        run(argv, step, on_line)
    stamp(name, value)


def install_project():
    """The project itself, in place, so that `.venv/bin/mm` exists."""
    value = digest("pyproject.toml", "setup.py", "CHANGELOG.md")
    if stamped("mm-project", value) and os.path.exists(os.path.join(VENV, "bin", "mm")):
        return
    with Step("the mm command") as step:
        argv = [VENV_PYTHON, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
        run([*argv, "--disable-pip-version-check", "-e", ROOT], step)
    stamp("mm-project", value)


def install_browser():
    """Debian's Chromium, which the browser tests drive; installed when root, else asked for."""
    if shutil.which("chromium"):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        fail(
            "the browser tests need Chromium.\n"
            "Debian: apt-get install chromium (as root); `make test` does it itself when root"
        )
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    with Step("Debian's package lists") as step:
        run(["apt-get", "update", "-q"], step)
    with Step("Debian's Chromium, for the browser tests") as step:

        def on_line(line):
            if line.startswith(("Get:", "Unpacking", "Setting up")):
                step.detail = line.strip()[:60]

        run(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"], step, on_line
        )


def main():
    """Do what is left to do."""
    dev = "--dev" in sys.argv[1:]
    check_machine()
    make_venv()
    install(DEV if dev else BASE, "mm-dev" if dev else "mm-base")
    install_project()
    if dev:
        install_browser()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; run it again to go on")
