"""The live page on Ray: endpoints of the registry, with the tokens of their fleets and pools."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.watching.cart_pole import DrawnCartPole
from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet, EnvPool
from rlmesh_ray.actors.registry.cluster_endpoints import ClusterEndpoints
from rlmesh_ray.auth.pool_tokens import endpoint_token
from rlmesh_ray.watch.live import LiveView
from tests.loopback.eventually import eventually
from tests.ray.test_pools import SECRET, simulator

pytestmark = pytest.mark.usefixtures("local_ray")


@contextlib.contextmanager
def stepping(address: str, token: str) -> Iterator[None]:
    """Have a session of two steps at an endpoint."""
    envs = RemoteVectorEnv(address, token=token)
    try:
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(np.zeros(envs.num_envs, np.int64))
        yield
    finally:
        envs.close()


def drawn(live: LiveView, endpoint_id: str) -> bytes | None:
    """Return a picture of the first lane of an endpoint's only session."""
    found = live.endpoints()["endpoints"]
    (key,) = [each["key"] for each in found if each["endpoint_id"] == endpoint_id]
    answer = live.sessions(key)
    assert answer is not None
    assert answer["problem"] == ""
    (session,) = answer["sessions"]
    assert session["num_steps"] == 2
    picture = live.picture(key, session["name"], 0)
    assert picture is not None
    assert picture.problem == ""
    return picture.png


def test_the_lanes_of_a_fleet_are_seen_with_its_own_token() -> None:
    with EnvFleet(DrawnCartPole, num_envs=2, num_cpus=0.1) as fleet:
        live = LiveView(ClusterEndpoints("Ray"))
        with stepping(fleet.addresses[0], fleet.tokens[0]):
            (endpoint_id,) = [
                each["endpoint_id"]
                for each in live.endpoints()["endpoints"]
                if each["address"] == fleet.addresses[0]
            ]

            assert drawn(live, endpoint_id)


def test_a_pool_is_watched_by_its_name_with_the_tokens_of_its_endpoints() -> None:
    with (
        EnvPool("watched", token=SECRET) as pool,
        simulator(pool, "one", DrawnCartPole, num_envs=2) as server,
        EnvFleet("CartPole-v1", num_cpus=0.1),
    ):
        source = ClusterEndpoints("Ray", ["watched"])
        assert eventually(source.endpoints)
        live = LiveView(source)
        with stepping(server.address, endpoint_token(SECRET, "watched", "one")):
            (seen,) = live.endpoints()["endpoints"]

            assert (seen["fleet"], seen["state"]) == ("pool/watched", "live")
            assert drawn(live, seen["endpoint_id"])
