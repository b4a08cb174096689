"""A Django project in the test process: sign-in, sessions, Django REST framework.

Importing it configures Django, once per process.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connections

_FOLDER = tempfile.TemporaryDirectory(prefix="onceward-django-")


settings.configure(
    SECRET_KEY="for tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=f"{__name__}.urls",
    USE_TZ=True,
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(Path(_FOLDER.name) / "shop.db"),
            "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"},
        }
    },
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sessions",
        "onceward.django",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "onceward.django.OncewardMiddleware",
    ],
    LOGIN_URL="/login",
    # Tables straight from the models: the migrations of Django's own apps take a second.
    MIGRATION_MODULES={"contenttypes": None, "auth": None, "sessions": None},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
call_command("migrate", run_syncdb=True, verbosity=0)

_numbers = itertools.count()


def add_django_database(url: str, **options: Any) -> str:
    """Add a database to the settings; return its alias."""
    alias, parts = f"database {next(_numbers)}", urlsplit(url)
    chosen: dict[str, Any] = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": url.removeprefix("sqlite:///"),
        "OPTIONS": {"timeout": 20, "init_command": "PRAGMA synchronous=OFF", **options},
    }
    if parts.scheme == "postgresql":
        chosen = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": parts.username,
            "PASSWORD": parts.password or "",
            "HOST": parts.hostname,
            "PORT": parts.port,
            "OPTIONS": options,
        }
    connections.databases[alias] = {**connections.settings["default"], **chosen}
    return alias
