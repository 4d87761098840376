"""Settings for tests: the product's own, with test secrets and a private state folder.

What the machine's environment says of an installation, of a terminal or of a model hub is nothing
to a run of the tests: it is taken out at the beginning, before anything reads it. The processes
that tests start get what the tests give them.
"""

import atexit
import os
import shutil
import sys
import tempfile

STRANGE = ("MM_", "HF_", "LLAMA_", "OLLAMA_", "GIT_", "SUPERVISOR_", "OPENAI_", "ANTHROPIC_")
STRANGERS = {
    *("REDIS_URL", "PUBLIC_ORIGIN", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "NO_COLOR"),
    *("GITHUB_ACTIONS", "COLUMNS", "LINES", "TERM", "PYTHONOPTIMIZE", "PYTHONWARNINGS"),
}
KEPT = {"MM_TEST_CACHE"}
LOOPBACK = "127.0.0.1,localhost,::1"

if "pytest" in sys.modules:  # the run itself; its children inherit what it sets
    for name in [*os.environ]:
        if (name.startswith(STRANGE) or name in STRANGERS) and name not in KEPT:
            del os.environ[name]
    for name in ("no_proxy", "NO_PROXY"):  # a proxy of the machine is not for loopback
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))
if "MM_HOME" not in os.environ:  # children inherit it, and leave it to us to remove
    os.environ["MM_HOME"] = tempfile.mkdtemp(prefix="mm-test-")
    atexit.register(shutil.rmtree, os.environ["MM_HOME"], ignore_errors=True)
os.environ.setdefault("MM_DJANGO_SECRET_KEY", "test-only-django-secret-key-0123456789-0123456789")
os.environ.setdefault("MM_KEY_PEPPER", "test-only-pepper")
os.environ.setdefault("MM_ENGINE_MASTER", "test-only-engine-master")

from mmadmin.settings import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["*"]
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":  # noqa: F405
    # a file, not memory: jobs are tested with threads and processes of their own
    DATABASES["default"]["TEST"] = {"NAME": str(HOME.root / "test.sqlite3")}  # noqa: F405
    # who waits for its turn on a busy machine has time: that is not what is tested
    DATABASES["default"]["OPTIONS"]["timeout"] = 120  # type: ignore[index]  # noqa: F405
STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # noqa: F405 (or WhiteNoise warns)
