"""What an observer refuses before anything is asked."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.client.env.observer import EndpointObserver
from rlmesh_ray.errors import CodecError, ConfigurationError, EndpointClosedError

ADDRESS = "127.0.0.1:1"


@pytest.fixture(name="observer")
def _observer() -> Iterator[EndpointObserver]:
    with EndpointObserver(ADDRESS) as observer:
        yield observer


@pytest.mark.parametrize("name", [5, None, b"name"])
def test_a_session_is_asked_for_by_its_name(observer: EndpointObserver, name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"session=.* must be the name of a session"):
        observer.render(name)


@pytest.mark.parametrize("lane", [True, 1.0, "0", None])
def test_a_lane_is_a_whole_number(observer: EndpointObserver, lane: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"lane=.* must be a whole number"):
        observer.render("name", lane)


@pytest.mark.parametrize("lane", [-1, np.int64(-1), 2**64])
def test_no_session_has_such_a_lane(observer: EndpointObserver, lane: Any) -> None:
    with pytest.raises(CodecError, match="no session has a lane"):
        observer.render("name", lane)


@pytest.mark.parametrize("timeout_s", [-1, 0, float("inf"), "1"])
def test_a_wrong_timeout_is_named_as_the_option_is(timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^timeout_s=.* must be a finite number"):
        EndpointObserver(ADDRESS, timeout_s=timeout_s)


def test_a_closed_observer_raises() -> None:
    observer = EndpointObserver(ADDRESS)
    for _ in range(2):
        observer.close()

    with pytest.raises(EndpointClosedError, match="this observer is closed"):
        observer.sessions()
    with pytest.raises(EndpointClosedError, match="this observer is closed"):
        observer.render("name")
