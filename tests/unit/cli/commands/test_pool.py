"""Output of the command ``pool`` about endpoints that register and leave."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.cli.commands import pool as command
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.signals import interrupt_on_sigterm
from rlmesh_ray.errors import EndpointUnreachableError


class Pool:
    """A pool with prepared answers, the last of which is Ctrl-C."""

    def __init__(self, *answers: Any) -> None:
        self._answers: Iterator[Any] = iter(answers)

    @property
    def endpoints(self) -> tuple[EndpointRecord, ...]:
        answer = next(self._answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        found: tuple[EndpointRecord, ...] = answer
        return found


def test_a_registry_that_does_not_answer_does_not_end_the_pool(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=lambda _s: None))
    there = (EndpointRecord("pool/games/sim-1", 1, "192.0.2.7:5555", "pool/games"),)
    pool: Any = Pool(there, EndpointUnreachableError("an actor is restarting"), there, ())

    # As main() does, which forgets the interrupts of earlier commands.
    with interrupt_on_sigterm(), pytest.raises(KeyboardInterrupt):
        command.follow(Console(is_json=True), pool)

    said = capsys.readouterr()
    assert [json.loads(line)["event"] for line in said.out.splitlines()] == ["came", "left"]
    assert "an actor is restarting" in said.err
