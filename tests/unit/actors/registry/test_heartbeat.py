"""A beat that meets an end."""

import threading
from typing import Any

import pytest

from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.lease_table import EndpointRecord


@pytest.mark.parametrize(("is_stopped", "asked"), [(True, ["renew"]), (False, ["renew", "resume"])])
def test_an_endpoint_that_withdraws_during_a_beat_is_not_taken_back(
    is_stopped: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat.__new__(Heartbeat)
    heartbeat.record = EndpointRecord("a", 1, "192.0.2.7:5555", "")
    heartbeat._stopped, heartbeat._retained_calls, heartbeat._statistics = (
        threading.Event(),
        set(),
        None,
    )
    said: list[str] = []

    def ask(method: str, *_: Any) -> bool:
        said.append(method)
        if is_stopped:  # another thread withdraws just before the registry hears of the renewal
            heartbeat._stopped.set()
        return method == "resume"

    monkeypatch.setattr(heartbeat, "_ask", ask)

    assert heartbeat._beat()
    assert said == asked
