"""Settings for tests: the product's own, with test secrets and a private state folder."""

import atexit
import os
import shutil
import tempfile

if "MM_HOME" not in os.environ:  # children inherit it, and leave it to us to remove
    os.environ["MM_HOME"] = tempfile.mkdtemp(prefix="mm-test-")
    atexit.register(shutil.rmtree, os.environ["MM_HOME"], ignore_errors=True)
os.environ.setdefault("MM_DJANGO_SECRET_KEY", "test-only-django-secret-key-0123456789-0123456789")
os.environ.setdefault("MM_KEY_PEPPER", "test-only-pepper")
os.environ.setdefault("MM_ENGINE_MASTER", "test-only-engine-master")

from mmadmin.settings import *  # noqa: F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["*"]
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":  # noqa: F405
    # a file, not memory: jobs are tested with threads and processes of their own
    DATABASES["default"]["TEST"] = {"NAME": str(HOME.root / "test.sqlite3")}  # noqa: F405
STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # noqa: F405 (or WhiteNoise warns)
