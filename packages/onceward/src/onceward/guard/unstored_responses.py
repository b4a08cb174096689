"""Responses below 400 that are not stored: those that free the key, and mistakes of the app."""

from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

from onceward.errors import StoreUnavailableError
from onceward.guard.execution import Execution
from onceward.guard.policy import STORABLE_REDIRECTS, Policy
from onceward.records import Response


async def frees_the_key(execution: Execution, response: Response, ttl: timedelta | None) -> bool:
    """Return whether a redirect, or a success without a TTL, is not stored, and frees the key."""
    request = execution.request
    if request.record_id is None or execution.writes_kept_on_error:
        return False
    if ttl is None:
        return True
    is_sign_in = leads_to_sign_in(response, request.policy, request.path)
    return is_sign_in and not await has_written(execution)


async def has_written(execution: Execution) -> bool:
    """Return whether the handler has written in its transaction."""
    try:
        return await execution.unit.has_written()
    except StoreUnavailableError:
        raise
    except Exception:  # noqa: BLE001 - a failed statement has aborted the transaction
        return True


def writes_error(execution: Execution, response: Response) -> str:
    """Return the advice for the developer."""
    endpoint, status = execution.request.endpoint, response.status
    undone = "Its writes were rolled back, because a retry would write again"
    if not execution.is_stored:
        return (
            f"{endpoint} has written, and called no_store(). {undone}. If that is intended, call "
            "keep_writes_on_error(), too"
        )
    if status in STORABLE_REDIRECTS:
        return (
            f"{endpoint} has written, and responds {status}, which its policy does not store. "
            f"{undone}. If it redirects after a success, write "
            f"Policy(redirects_stored={{{status}}})"
        )
    return (
        f"{endpoint} has written, and responds {status}, which is never stored. {undone}. After a "
        "success, respond 303 and write Policy(redirects_stored={303})"
    )


def redirect_warning(execution: Execution, response: Response) -> str | None:
    """Return a hint for the developer about a redirect that is not stored; None if it is meant."""
    request = execution.request
    if not execution.is_stored or leads_to_sign_in(response, request.policy, request.path):
        return None
    return (
        f"{request.endpoint} responds {response.status}, which is not stored: a retry runs the "
        "handler again. If it redirects after a success, write "
        "Policy(redirects_stored={302, 303})"
    )


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
