"""Order and completeness with many sessions at once, all of them pipelining."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import gymnasium

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject, RawModelSession
from rlmesh_ray.protocol.messages import (
    Close,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    EnvRequest,
    Predict,
    Render,
    Reset,
)
from tests.compliance.conftest import zeros

OfRoute = ConfigureRoute | Predict | CloseRoute

SESSIONS = 3
STEPS = 300
ROUTES = [f"route-{number}" for number in range(5)]


def test_env_sessions_lose_and_reorder_nothing_under_load() -> None:
    def raw_session(address: str) -> tuple[list[str], list[str]]:
        subject = EnvSubject(ConnectOptions(address))
        with subject.session() as session:
            requests: list[EnvRequest] = [Reset(session.new_id())]
            for number in range(STEPS):
                requests.append(session.step_request())
                if number % 50 == 0:
                    requests += [Render(session.new_id()), Reset(session.new_id(), seeds=(1,) * 99)]
            requests.append(Close(session.new_id()))
            for request in requests:
                session.send(request)
            return (
                [request.request_id for request in requests],
                [response.request_id for response in session.until_end()],
            )

    with EnvServer("CartPole-v1", num_envs=2) as server, ThreadPoolExecutor(SESSIONS) as threads:
        outcomes = list(threads.map(raw_session, [server.address] * SESSIONS))

    for sent, received in outcomes:
        assert received == sent


def test_model_sessions_keep_each_routes_order_under_load() -> None:
    contract = contract_of(gymnasium.make_vec("CartPole-v1", num_envs=2))

    def raw_session(address: str) -> tuple[list[OfRoute], list[str]]:
        with ModelSubject(ConnectOptions(address), contract).session() as session:
            requests = list(lives(session))
            for request in requests:
                session.send(request)
            session.send(CloseModel(session.new_id()))
            return requests, [response.request_id for response in session.until_end()]

    with ModelServer(zeros) as server, ThreadPoolExecutor(SESSIONS) as threads:
        outcomes = list(threads.map(raw_session, [server.address] * SESSIONS))

    for requests, received in outcomes:
        for route in ROUTES:
            sent = [one.request_id for one in requests if one.context.route_id == route]
            assert [one for one in received if one in set(sent)] == sent
        assert len(received) == len(requests) + 1


def lives(session: RawModelSession) -> Iterator[OfRoute]:
    """Yield the requests of whole routes, side by side."""
    for route in ROUTES:
        yield session.configure_request(route)
    for step in range(STEPS // len(ROUTES)):
        for route in ROUTES:
            yield session.predict_request(route, step=step)
    for route in ROUTES:
        yield session.close_route_request(route)
