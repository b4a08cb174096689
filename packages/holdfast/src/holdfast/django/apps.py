"""The Django app: ``manage.py migrate`` creates Holdfast's tables next to the project's own."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

__all__ = ["HoldfastConfig"]


class HoldfastConfig(AppConfig):  # type: ignore[misc]
    """Creates the tables after each ``migrate`` of the database that Holdfast uses."""

    name = "holdfast.django"
    label = "holdfast"
    verbose_name = "Holdfast"

    def ready(self) -> None:
        """Connect to Django's signal."""
        post_migrate.connect(_create_tables, sender=self)


def _create_tables(*, using: str, **_: Any) -> None:
    from holdfast.server.django_views import django_holdfast  # noqa: PLC0415 - after the settings

    configured = django_holdfast()
    if using == configured.using:
        configured.store.migrate()
