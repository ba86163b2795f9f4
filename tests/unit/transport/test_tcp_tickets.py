from types import SimpleNamespace

import pytest

from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.tcp import TicketIssuer


def test_a_ticket_is_good_for_one_connection() -> None:
    issuer = TicketIssuer("endpoint")
    ticket = issuer.issue("session", 50)

    first, second = issuer.take(ticket.ticket_id), issuer.take(ticket.ticket_id)

    assert first is not None
    assert (first.ticket, first.session_id, first.timeout_ms) == (ticket, "session", 50)
    assert second is None


def test_a_newer_ticket_replaces_the_older_one_of_its_session_only() -> None:
    issuer = TicketIssuer("endpoint")
    older, other, newer = (issuer.issue(session, 0) for session in ("one", "two", "one"))

    assert issuer.take(older.ticket_id) is None
    assert issuer.take(other.ticket_id) is not None
    assert issuer.take(newer.ticket_id) is not None


def test_a_ticket_expires_after_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    issuer = TicketIssuer("endpoint")
    early, late = issuer.issue("one", 0), issuer.issue("two", 0)

    clock.now_s = 130.0
    assert issuer.take(early.ticket_id) is not None
    clock.now_s = 130.1
    assert issuer.take(late.ticket_id) is None
