"""Recognizes redirects that ask the caller to sign in."""

from urllib.parse import parse_qsl, urlsplit

from onceward.core.idempotency_record import Response
from onceward.core.policy import Policy

__all__ = ["leads_to_sign_in"]


def leads_to_sign_in(response: Response, policy: Policy, path: str) -> bool:
    """Return whether a redirect leads to a sign-in page, after a request to this path.

    Either the policy names its path, or the target is to lead back here: frameworks append the
    address of the request as ``?next=…``, and sign-in services have names of their own for it.
    """
    location = next((value for name, value in response.headers if name == b"location"), b"")
    try:
        target = urlsplit(location.decode("latin-1"))
        query = parse_qsl(target.query)
    except ValueError:  # not a URL: no client can follow it
        return False
    if _plain(target.path) in {_plain(one) for one in policy.sign_in_paths}:
        return True
    return any(_leads_back(value, path) for _, value in query)


def _leads_back(value: str, path: str) -> bool:
    if _plain(path) == "" or not value.startswith(("/", "http://", "https://")):
        return False
    try:
        # The path of the request is without the prefix at which the app is mounted.
        return _plain(urlsplit(value).path).endswith(_plain(path))
    except ValueError:
        return False


def _plain(path: str) -> str:
    return path.rstrip("/").lower()
