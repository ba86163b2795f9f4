"""ModelServer's port for openpi clients, over real WebSocket."""

import contextlib
import http
import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from rlmesh_ray import ListenOptions, ModelServer, RemoteModel, TokenFile
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.dialects.openpi import server as openpi_server
from rlmesh_ray.dialects.openpi.wire import pack
from rlmesh_ray.errors import AddressError, ConfigurationError, ContractMismatchError, ListenError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.server.endpoint.gate import CONNECTION_SETUP_S
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import contract_of, from_gymnasium
from tests.frame_mutation import damaged
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.openpi_peer import TIMEOUT_S, Arm, Client, batch, doubled, observation
from tests.loopback.ports import free_address

LOCAL = "127.0.0.1:0"
OPENPI = ListenOptions(openpi=LOCAL)
NUM_DAMAGED = 300


def address_of(server: ModelServer) -> str:
    assert server.openpi_address is not None
    return server.openpi_address


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    with Client(address_of(server)) as connected:
        yield connected


def test_the_metadata_comes_first_and_then_an_answer_to_each_observation(client: Client) -> None:
    first = client.infer(observation(0.5))
    image = observation()["observation/image"]
    second = client.infer({"observation": {"state": [1, 2], "image": image}, "prompt": ""})

    assert client.metadata["action_horizon"] == 1
    assert client.metadata["action_space"]["actions"]["shape"] == [2]
    assert first["actions"].tolist() == [[1.0, 1.0]]
    assert second["actions"].tolist() == [[2.0, 4.0]]
    assert first["server_timing"]["infer_ms"] > 0
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] > 0


def test_a_policy_of_chunks_answers_with_its_horizon() -> None:
    def chunks(observations: Any) -> Any:
        return np.stack([doubled(observations) + step for step in range(5)], axis=1)

    with (
        ModelServer(chunks, horizon=5, address=OPENPI, openpi_env=Arm()) as server,
        Client(address_of(server)) as client,
    ):
        result = client.infer(observation(0.0))

    assert client.metadata["action_horizon"] == 5
    assert result["actions"].tolist() == [[step, step] for step in range(5)]


class TwoParts:
    """An environment whose actions are a Dict."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Dict({"arm": Arm.action_space, "gripper": spaces.Discrete(2)})


def test_a_dict_of_actions_has_one_key_a_leaf() -> None:
    def act(observations: Any) -> Any:
        return {"arm": observations, "gripper": np.ones(len(observations), int)}

    with (
        ModelServer(act, address=OPENPI, openpi_env=TwoParts()) as server,
        Client(address_of(server)) as client,
    ):
        result = client.infer({"observation": np.array([0.25, 0.5])})

    assert result["arm"].tolist() == [[0.25, 0.5]]
    assert result["gripper"].tolist() == [1]


class Gate:
    """A policy that counts the rows of its batches, and stops in the first one."""

    traits = PolicyTraits(checks_concurrently=True)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def check_contract(self, contract: EnvContract) -> None:
        """Take any."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return twice the state, when the gate is open."""
        self.batches.append(rows.num_rows)
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        return doubled(rows.observations)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Have nothing to forget."""


def test_openpi_clients_and_grpc_clients_share_the_batches() -> None:
    gate = Gate()
    with (
        ModelServer(gate, address=OPENPI, openpi_env=Arm()) as server,
        RemoteModel(server.address) as ours,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(4) as pool,
    ):
        first, second, third = (stack.enter_context(Client(address_of(server))) for _ in range(3))
        ours.configure_route(contract_of(Arm()))
        blocking = pool.submit(first.infer, observation(0.0))
        assert gate.has_begun.wait(TIMEOUT_S)
        waiting = [
            pool.submit(second.infer, observation(1.0)),
            pool.submit(third.infer, observation(2.0)),
        ]
        over_grpc = pool.submit(ours.predict, batch(3.0))
        assert eventually(lambda: server.statistics().items_waiting == 3)
        gate.may_go_on.set()

        assert blocking.result(TIMEOUT_S)["actions"].tolist() == [[0.0, 0.0]]
        results = [each.result(TIMEOUT_S) for each in waiting]
        assert over_grpc.result(TIMEOUT_S).tolist() == [[6.0, 6.0]]

    assert gate.batches == [1, 3]
    assert [result["actions"].tolist() for result in results] == [[[2.0, 2.0]], [[4.0, 4.0]]]
    assert results[0]["server_timing"]["batch_rows"] == 3


def test_a_client_that_leaves_while_it_waits_costs_no_row() -> None:
    gate = Gate()
    with (
        ModelServer(gate, address=OPENPI, openpi_env=Arm()) as server,
        Client(address_of(server)) as first,
        ThreadPoolExecutor(1) as pool,
    ):
        blocking = pool.submit(first.infer, observation(0.0))
        assert gate.has_begun.wait(TIMEOUT_S)
        with Client(address_of(server)) as second:
            second.connection.send(pack(observation(1.0)))
            assert eventually(lambda: server.statistics().items_waiting == 1)
        assert eventually(lambda: server.statistics().cancelled == 1)
        gate.may_go_on.set()
        blocking.result(TIMEOUT_S)

    assert gate.batches == [1]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"state": np.zeros(2)}, "lacks 'observation/image', 'observation/state', 'prompt'"),
        (observation(extra=1), "has the unknown 'extra'; this policy takes"),
        (observation(float("nan")), "is NaN"),
        (b"\xc1", "this is not msgpack"),
        ("a text", "a binary message"),
        (pack(observation())[:-1], "this is not msgpack"),
    ],
)
def test_what_does_not_fit_is_answered_with_text_and_ends_that_session_alone(
    client: Client, server: ModelServer, message: Any, reason: str
) -> None:
    answer = client.infer(message)
    with pytest.raises(ConnectionClosed) as closed:
        client.connection.recv(TIMEOUT_S)
    with Client(address_of(server)) as another:
        result = another.infer(observation(0.5))

    assert isinstance(answer, str)
    assert reason in answer
    assert "Traceback" not in answer
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert result["actions"].tolist() == [[1.0, 1.0]]


def test_a_fault_of_the_policy_is_told_without_its_traceback() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("no weights")

    with (
        ModelServer(fail, address=OPENPI, openpi_env=Arm()) as server,
        Client(address_of(server)) as client,
    ):
        answer = client.infer(observation())
        errors = server.statistics().errors

    assert answer == "the policy function raised ValueError: no weights"
    assert errors == {"INTERNAL": 1}


def test_a_message_above_the_limit_ends_the_session(client: Client, server: ModelServer) -> None:
    with pytest.raises(ConnectionClosed) as closed:
        client.infer(observation(extra=bytes(2**20)))
    with Client(address_of(server)) as another:
        assert "actions" in another.infer(observation())

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_damaged_messages_are_answered_or_refused_and_the_server_goes_on(
    server: ModelServer,
) -> None:
    chance, message = random.Random(7), pack(observation())
    num_refused = 0
    client = Client(address_of(server))

    for _ in range(NUM_DAMAGED):
        answer = client.infer(damaged(message, chance))
        if isinstance(answer, str):
            num_refused += 1
            client.close()
            client = Client(address_of(server))

    assert client.infer(observation(0.5))["actions"].tolist() == [[1.0, 1.0]]
    client.close()
    assert NUM_DAMAGED / 10 < num_refused < NUM_DAMAGED
    assert eventually(lambda: server.statistics().sessions.open == 0)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_healthz_answers_over_http_without_a_token() -> None:
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm(), token="s3cret") as server:
        url = f"http://{address_of(server)}"
        serving = get(f"{url}/healthz")
        other, _ = get(f"{url}/")
        server.drain(0.0)
        draining, _ = get(f"{url}/healthz")

    assert serving == (200, "OK\n")
    assert other == http.HTTPStatus.UNAUTHORIZED
    assert draining == http.HTTPStatus.SERVICE_UNAVAILABLE


def api_key(token: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Api-Key {token}"}}


def test_a_token_travels_as_api_key(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("operators\nclients client\nprobes probe\n")
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm(), token=TokenFile(file)) as server:
        for token in ("operators", "clients"):
            with Client(address_of(server), **api_key(token)) as client:
                assert "actions" in client.infer(observation())
        for options, status in (
            ({}, 401),
            (api_key("wrong"), 401),
            ({"additional_headers": {"Authorization": "Basic clients"}}, 401),
            (api_key("probes"), 403),
        ):
            with pytest.raises(InvalidStatus) as refused:
                Client(address_of(server), **options)
            assert refused.value.response.status_code == status


def test_without_a_token_web_pages_are_refused(server: ModelServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Client(address_of(server), origin="http://example.org")

    assert refused.value.response.status_code == http.HTTPStatus.FORBIDDEN


@needs_openssl
@pytest.mark.nightly  # it takes as long as a client may
def test_a_client_that_does_not_shake_hands_for_tls_is_cut_off_in_time(tmp_path: Path) -> None:
    tls = ServerTls(*Authority(tmp_path, "ours").sign("server"))
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm(), tls=tls) as server:
        host, _, port = address_of(server).partition(":")
        with (
            socket.create_connection((host, int(port)), 2 * CONNECTION_SETUP_S) as silent,
            contextlib.suppress(ConnectionResetError),
        ):
            assert silent.recv(1) == b""


@needs_openssl
def test_it_serves_tls_with_the_files_of_the_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    tls = ServerTls(*authority.sign("server"))
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm(), tls=tls) as server:
        trusted = ClientTls(authority.certificate)
        with RemoteModel(f"openpi://{address_of(server)}", tls=trusted) as model:
            model.configure_route(Arm())
            assert model.predict(batch(0.5)).tolist() == [[1.0, 1.0]]
        with pytest.raises(InvalidHandshake):
            Client(address_of(server), open_timeout=TIMEOUT_S)


def test_connections_that_open_nothing_make_room_for_others(server: ModelServer) -> None:
    host, _, port = address_of(server).rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
            for _ in range(openpi_server.MAX_STRANGERS + 1)
        ]
        with Client(address_of(server)) as client:
            assert "actions" in client.infer(observation())

        assert [each.recv(1) for each in silent[:2]] == [b"", b""]


def test_a_silent_client_is_sent_away_after_the_idle_timeout() -> None:
    with (
        ModelServer(
            doubled,
            address=ListenOptions(openpi=LOCAL, idle_timeout_s=0.05),
            openpi_env=Arm(),
        ) as server,
        Client(address_of(server)) as client,
        pytest.raises(ConnectionClosed, match=r"no request for 0\.05 s"),
    ):
        client.connection.recv(TIMEOUT_S)


def test_a_drain_waits_for_its_sessions_and_refuses_new_ones(server: ModelServer) -> None:
    with Client(address_of(server)) as client:
        assert not server.drain(0.0)
        with pytest.raises(InvalidStatus) as refused:
            Client(address_of(server))
        assert "actions" in client.infer(observation())
    assert server.drain(TIMEOUT_S)

    assert refused.value.response.status_code == http.HTTPStatus.SERVICE_UNAVAILABLE


def test_a_stop_answers_what_is_outstanding_and_closes_idle_connections() -> None:
    gate = Gate()
    with (
        ModelServer(gate, address=OPENPI, openpi_env=Arm()) as server,
        Client(address_of(server)) as idle,
        Client(address_of(server)) as busy,
        ThreadPoolExecutor(2) as pool,
    ):
        answer = pool.submit(busy.infer, observation(0.5))
        assert gate.has_begun.wait(TIMEOUT_S)
        stopping = pool.submit(server.stop, TIMEOUT_S)
        with pytest.raises(ConnectionClosed) as closed:
            idle.connection.recv(TIMEOUT_S)
        gate.may_go_on.set()
        result = answer.result(TIMEOUT_S)
        stopping.result(TIMEOUT_S)

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    assert result["actions"].tolist() == [[1.0, 1.0]]


def test_a_stop_ends_in_time_although_the_policy_hangs() -> None:
    gate = Gate()
    with (
        ModelServer(gate, address=OPENPI, openpi_env=Arm()) as server,
        Client(address_of(server)) as client,
    ):
        client.connection.send(pack(observation()))
        assert gate.has_begun.wait(TIMEOUT_S)
        server.stop(0.05)
        with pytest.raises(ConnectionClosed):
            client.connection.recv(TIMEOUT_S)
        gate.may_go_on.set()


def test_the_spaces_are_those_that_the_policy_names() -> None:
    gate = Gate()
    gate.may_go_on.set()
    contract = contract_of(Arm())
    gate.traits = PolicyTraits(
        observation_space=contract.observation_space, action_space=contract.action_space
    )
    with ModelServer(gate, address=OPENPI) as server, Client(address_of(server)) as client:
        assert client.infer(observation(0.5))["actions"].tolist() == [[1.0, 1.0]]


def test_an_observation_map_stands_between_openpi_clients_and_the_policy() -> None:
    def act(observations: Any) -> Any:
        return 2 * observations["joints"]

    with (
        ModelServer(
            act, observation_map=["joints=observation/state"], address=OPENPI, openpi_env=Arm()
        ) as server,
        Client(address_of(server)) as client,
    ):
        assert client.infer(observation(0.5))["actions"].tolist() == [[1.0, 1.0]]


class Picky(Gate):
    """A policy that cannot act anywhere."""

    def check_contract(self, contract: EnvContract) -> None:
        """Refuse."""
        raise ContractMismatchError("it needs another camera")


def test_what_cannot_be_served_is_refused_before_clients_come(tmp_path: Path) -> None:
    text = replace(contract_of(Arm()), action_space=from_gymnasium(spaces.Text(3)))
    with pytest.raises(ConfigurationError, match="give an environment that has them"):
        ModelServer(doubled, address=OPENPI)
    with pytest.raises(ConfigurationError, match="openpi=HOST:PORT"):
        ModelServer(doubled, openpi_env=Arm())
    with pytest.raises(ConfigurationError, match="'actions' is text"):
        ModelServer(doubled, address=OPENPI, openpi_env=text)
    with pytest.raises(ConfigurationError, match="is not an environment"):
        ModelServer(doubled, address=OPENPI, openpi_env=3)
    with pytest.raises(AddressError, match="give a token"):
        ModelServer(doubled, address=ListenOptions(openpi="0.0.0.0:0"), openpi_env=Arm())
    with pytest.raises(AddressError, match="over TCP; give HOST:PORT"):
        ModelServer(
            doubled, address=ListenOptions(openpi=f"unix:{tmp_path}/socket"), openpi_env=Arm()
        )
    with pytest.raises(AddressError, match=r"on a port of its own: ListenOptions\(\.\.\., openpi="):
        ModelServer(doubled, address="openpi://127.0.0.1:0")
    with pytest.raises(ContractMismatchError, match="another camera"):
        ModelServer(Picky(), address=OPENPI, openpi_env=Arm()).start()


def test_a_port_in_use_is_refused_and_the_servers_own_port_is_free_again() -> None:
    address = free_address()
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as server:
        taken = ListenOptions(address, openpi=address_of(server))
        second = ModelServer(doubled, address=taken, openpi_env=Arm())
        with pytest.raises(ListenError, match=r"openpi clients: .*choose another port"):
            second.start()
    with ModelServer(doubled, address=address):
        pass
