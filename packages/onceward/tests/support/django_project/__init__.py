"""A Django project in the test process: sign-in, sessions, Django REST framework.

Importing it configures Django, once per process.
"""

import tempfile
from pathlib import Path

import django
from django.conf import settings
from django.core.management import call_command

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
