"""Which route of a Django project takes batches: what its responses say in ``Onceward-Batch``."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django.conf import settings as django_settings
    from django.http import HttpRequest
    from django.urls import NoReverseMatch, get_resolver, get_script_prefix, reverse

from onceward.batch.options import BatchOptions, batch_header
from onceward.frameworks.sync_bridge import batch_options
from onceward.guard.exchange import Headers

__all__ = ["batch_headers", "mark_batch_view", "options_of_batch"]

_MARK = "_onceward_batch"


def mark_batch_view(view: Callable[..., Any]) -> None:
    """Let ``batch_headers`` find the routes to this view."""
    setattr(view, _MARK, True)


def batch_headers(request: HttpRequest) -> Headers:
    """Return the header that names the batch endpoint; none if the project has no route to it."""
    urlconf = getattr(request, "urlconf", None) or django_settings.ROOT_URLCONF
    look_up = _path_of_batch if isinstance(urlconf, str) else _path_of_batch.__wrapped__
    path = look_up(urlconf, get_script_prefix())
    return () if path is None else (batch_header(path, options_of_batch().max_items),)


def options_of_batch() -> BatchOptions:
    """Return ``settings.ONCEWARD["BATCH"]``."""
    given: Mapping[str, Any] = getattr(django_settings, "ONCEWARD", {})
    return batch_options(given.get("BATCH")) or BatchOptions()


@cache
def _path_of_batch(urlconf: Any, _prefix: str) -> str | None:
    for view in get_resolver(urlconf).reverse_dict:
        if getattr(view, _MARK, False):
            with suppress(NoReverseMatch):
                return str(reverse(view, urlconf=urlconf))
    return None
