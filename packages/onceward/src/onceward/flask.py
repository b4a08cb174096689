"""Onceward for Flask: ``FlaskGuard`` and the principal of Flask-Login."""

from onceward.frameworks.flask import FlaskGuard, login_principal

__all__ = ["FlaskGuard", "login_principal"]
