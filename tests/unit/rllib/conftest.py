"""What the tests of RLlib's side never do: look how busy the machine is, which takes a second."""

import pytest

from rlmesh_ray.rllib.config import learner_threads


@pytest.fixture(autouse=True)
def every_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_threads, "idle_cores", lambda cores, *, enough: cores)
