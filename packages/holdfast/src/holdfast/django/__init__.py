"""Holdfast for Django and Django REST framework. A Django app: add it to ``INSTALLED_APPS``."""

from holdfast.server.django_batch import batch
from holdfast.server.django_views import HoldfastMiddleware, execution, guard, user_principal

__all__ = ["HoldfastMiddleware", "batch", "execution", "guard", "user_principal"]
