"""A renewal that meets the end of its endpoint."""

import threading
from typing import Any

import pytest

from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.lease_table import EndpointRecord


@pytest.mark.parametrize(
    ("is_stopped", "methods"), [(True, ["renew"]), (False, ["renew", "resume"])]
)
def test_an_endpoint_that_withdraws_during_a_renewal_is_not_entered_again(
    is_stopped: bool, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat.__new__(Heartbeat)
    heartbeat.record = EndpointRecord("a", 1, "192.0.2.7:5555", "")
    heartbeat._stopped, heartbeat._retained_calls, heartbeat._statistics = (
        threading.Event(),
        set(),
        None,
    )
    called: list[str] = []

    def ask(method: str, *_: Any) -> bool:
        called.append(method)
        if is_stopped:  # another thread withdraws just before the renewal arrives
            heartbeat._stopped.set()
        return method == "resume"

    monkeypatch.setattr(heartbeat, "_ask", ask)

    assert heartbeat._renew()
    assert called == methods
