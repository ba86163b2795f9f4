"""How many file descriptors a new session must find."""

import os
import resource

import pytest

from rlmesh_ray.errors import CapacityError
from rlmesh_ray.server.endpoint.gate import require_descriptors


@pytest.mark.parametrize(("limit", "spare"), [(64, 4), (512, 32), (65536, 64)])
def test_a_session_finds_what_it_needs_and_leaves_some(
    monkeypatch: pytest.MonkeyPatch, limit: int, spare: int
) -> None:
    others = ["0"] * (limit - spare - 8)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    # One more is in the list: that which reads the folder.
    monkeypatch.setattr(os, "listdir", lambda _: ["1", *others])

    require_descriptors(8)
    with pytest.raises(CapacityError, match=rf"has {len(others)} of {limit} file descriptors"):
        require_descriptors(9)


def test_where_the_folder_cannot_be_read_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> list[str]:
        raise OSError("Too many open files")

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))

    with pytest.raises(CapacityError, match="has 64 of 64 file descriptors"):
        require_descriptors(0)


def test_a_process_without_a_limit_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))

    require_descriptors(10**9)
