"""Onceward for Django and Django REST framework. A Django app: add it to ``INSTALLED_APPS``."""

from onceward.server.django_batch import batch
from onceward.server.django_views import OncewardMiddleware, execution, guard, user_principal

__all__ = ["OncewardMiddleware", "batch", "execution", "guard", "user_principal"]
