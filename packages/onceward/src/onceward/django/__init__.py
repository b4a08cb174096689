"""Onceward for Django and Django REST framework. A Django app: add it to ``INSTALLED_APPS``."""

from onceward.frameworks.django import OncewardMiddleware, execution, guard, user_principal
from onceward.frameworks.django_batch import batch

__all__ = ["OncewardMiddleware", "batch", "execution", "guard", "user_principal"]
