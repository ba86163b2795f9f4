"""What the tests of RLlib's side never do: look how busy the machine is, which takes a second."""

import pytest


@pytest.fixture(autouse=True)
def threads_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
