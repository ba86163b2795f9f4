"""The endpoint and the session that a log record belongs to.

The code that serves a session enters its context; the formatters of ``log_format`` write both names
into the records that are logged there.

A session's name in the log is not its id: a client that knows the id of an open session may call
into its lanes, or fetch its shared memory. ``short_name`` cannot be turned back into it.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

_NAME_CHARACTERS = 8

_ENDPOINT: ContextVar[str] = ContextVar("rlmesh_ray_endpoint", default="")
_SESSION: ContextVar[str] = ContextVar("rlmesh_ray_session", default="")


def new_endpoint_id() -> str:
    return secrets.token_hex(_NAME_CHARACTERS // 2)


def short_name(session_id: str) -> str:
    """Return the name of a session in the log.

    Args:
        session_id: Its id, a secret; empty where the protocol has none: the name is drawn then.
    """
    if not session_id:
        return secrets.token_hex(_NAME_CHARACTERS // 2)
    return hashlib.sha256(session_id.encode()).hexdigest()[:_NAME_CHARACTERS]


def enter(endpoint_id: str, session: str) -> None:
    """Have records carry these names from now on, in this task and in those that it begins."""
    _ENDPOINT.set(endpoint_id)
    _SESSION.set(session)


def current() -> tuple[str, str]:
    """Return the names that records carry now: of the endpoint, of the session.

    For code of a session that runs outside of its task, such as timers.
    """
    return _ENDPOINT.get(), _SESSION.get()


@contextlib.contextmanager
def logged_as(endpoint_id: str, session: str = "") -> Iterator[None]:
    """Have records carry these names, within the context and in tasks that begin there."""
    former_endpoint, former_session = _ENDPOINT.set(endpoint_id), _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(former_session)
        _ENDPOINT.reset(former_endpoint)


def facts(event: str, **fields: object) -> dict[str, dict[str, object]]:
    """Return what a record says to programs, as ``extra`` of the call that logs it.

    Args:
        event: What happened, in a word that does not change.
        fields: Anything that JSON can express.
    """
    return {"facts": {"event": event, **fields}}
