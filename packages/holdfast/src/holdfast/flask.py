"""Holdfast for Flask: ``FlaskGuard`` and the principal of Flask-Login."""

from holdfast.server.flask_views import FlaskGuard, login_principal

__all__ = ["FlaskGuard", "login_principal"]
