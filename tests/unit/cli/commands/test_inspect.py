import json

import pytest

from rlmesh_ray.cli.commands.inspect import _show_sessions
from rlmesh_ray.cli.console import Console
from rlmesh_ray.client.env.observer import ObservedSession

SESSION = ObservedSession("one", "ipv4:1", 0, "v1", "grpc", ("a",), (2,), (3.0,), 2, 2, 1, 0, 0)


@pytest.mark.parametrize("sessions", [(), (SESSION,), (SESSION, SESSION)])
def test_the_number_of_sessions_is_an_event_before_each_of_them(
    sessions: tuple[ObservedSession, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _show_sessions(Console(is_json=True), "127.0.0.1:7", sessions)

    number, *events = map(json.loads, capsys.readouterr().out.splitlines())
    assert number == {"event": "sessions", "address": "127.0.0.1:7", "count": len(sessions)}
    assert [event["event"] for event in events] == ["session"] * len(sessions)
