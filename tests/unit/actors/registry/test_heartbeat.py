"""A renewal that meets the end of its endpoint."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlmesh_ray.actors.registry.heartbeat import Heartbeat


class FakeRegistry:
    """A registry that has forgotten the endpoint.

    Args:
        on_renewal: Called just before the renewal arrives.
    """

    def __init__(self, on_renewal: Callable[[], None]) -> None:
        self.called: list[str] = []
        self.is_renewed_again = threading.Event()
        self._on_renewal = on_renewal

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._answer(method))

    def _answer(self, method: str) -> object:
        if method == "renew" and "renew" not in self.called:
            self._on_renewal()
        elif method == "renew":
            self.is_renewed_again.set()
        self.called.append(method)
        return {"announce": 1, "renew": False, "resume": True}.get(method)


@pytest.mark.parametrize(
    ("withdraws", "methods"),
    [
        (True, ["announce", "withdraw", "renew"]),
        (False, ["announce", "renew", "resume", "renew"]),
    ],
)
def test_an_endpoint_that_withdraws_during_a_renewal_is_not_entered_again(
    withdraws: bool, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_renew, superseded = threading.Event(), threading.Event()

    def on_renewal() -> None:
        assert may_renew.wait(60.0)
        if withdraws:
            heartbeat.end()

    registry = FakeRegistry(on_renewal)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: registry)
    monkeypatch.setattr(ray, "get", lambda answer, **_: answer)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    before = set(threading.enumerate())

    heartbeat = Heartbeat("a", "192.0.2.7:5555", period_s=0.0, on_superseded=superseded.set)
    (thread,) = set(threading.enumerate()) - before
    may_renew.set()
    if not withdraws:
        assert registry.is_renewed_again.wait(60.0)
        heartbeat.end()
    thread.join(60.0)

    assert registry.called[: len(methods)] == methods
    assert ("resume" in registry.called) != withdraws
    assert not superseded.is_set()
