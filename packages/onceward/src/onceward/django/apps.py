"""The Django app: ``manage.py migrate`` creates the tables of all parts of Onceward."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class OncewardConfig(AppConfig):  # type: ignore[misc]
    """Creates the tables after each ``migrate`` of the database that Onceward uses."""

    name = "onceward.django"
    label = "onceward"
    verbose_name = "Onceward"

    def ready(self) -> None:
        """Connect to Django's signal."""
        post_migrate.connect(_create_tables, sender=self)


def _create_tables(*, using: str, **_: Any) -> None:
    from onceward.frameworks.django import django_onceward  # noqa: PLC0415 - after the settings
    from onceward.stores.parts import installed_parts  # noqa: PLC0415

    configured = django_onceward()
    if using == configured.using:
        configured.store.schema.want(*installed_parts().values())
        configured.store.migrate()
