"""Onceward for Django and Django REST framework. A Django app: add it to ``INSTALLED_APPS``."""

from onceward.frameworks.django import (
    OncewardMiddleware,
    batch,
    execution,
    guard,
    user_principal,
)

__all__ = ["OncewardMiddleware", "batch", "execution", "guard", "user_principal"]
