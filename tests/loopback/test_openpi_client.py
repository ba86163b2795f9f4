"""RemoteModel and evaluate at openpi servers, ours and others'."""

import gc
import http
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from websockets.http11 import Request

from rlmesh_ray import (
    EnvServer,
    ListenOptions,
    ModelServer,
    RemoteEnv,
    RemoteModel,
    Slots,
    evaluate,
)
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import policy_of, shake_hands
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteModelError,
)
from rlmesh_ray.spaces.gym_conversion import contract_of
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.openpi_peer import TIMEOUT_S, Arm, batch, doubled, small_server
from tests.loopback.ports import free_address

LOCAL = "127.0.0.1:0"
OPENPI = ListenOptions(openpi=LOCAL)


def chunk(message: dict[str, Any]) -> dict[str, Any]:
    """Return three actions, as a stock server does."""
    state = message["observation/state"]
    return {"actions": np.stack([2 * state + step for step in range(3)]).astype(np.float64)}


@pytest.fixture
def other() -> Iterator[str]:
    """The address of a server of another project."""
    with small_server(chunk, {"reset_pose": [0.0, 1.0]}) as address:
        yield f"openpi://{address}"


def test_a_prediction_is_the_first_action_of_the_chunk(other: str) -> None:
    with RemoteModel(other) as model:
        model.configure_route(Arm())

        actions = model.predict(batch(0.5))

        assert actions.dtype == np.float32
        assert actions.tolist() == [[1.0, 1.0]]
        assert model.last_telemetry() is None


def test_a_chunk_has_what_the_server_sends_or_what_was_asked_for(other: str) -> None:
    with RemoteModel(other) as model:
        model.configure_route(Arm())
        model.configure_route(Arm(), route_id="short", horizon=2)

        whole = model.predict_chunk(batch(0.5))
        short = model.predict_chunk(batch(0.5), route_id="short")

    assert whole.tolist() == [[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]]
    assert short.tolist() == whole[:, :2].tolist()


def test_the_lanes_of_a_route_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=TIMEOUT_S)

    def infer(message: dict[str, Any]) -> dict[str, Any]:
        together.wait()
        return chunk(message)

    with small_server(infer) as address, RemoteModel(f"openpi://{address}") as model:
        model.configure_route(Arm())
        slots = Slots([0, 4, 2], ["a", "b", "c"], [0, 0, 0], [True] * 3)

        actions = model.predict(batch(1.0, 2.0, 3.0), slots=slots)
        chunks = model.predict_chunk(batch(1.0, 2.0, 3.0), slots=slots)

    assert actions.tolist() == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert chunks[:, 0].tolist() == actions.tolist()
    assert chunks.shape == (3, 3, 2)


def test_a_lane_that_is_named_twice_is_refused_and_the_session_goes_on(other: str) -> None:
    with RemoteModel(other) as model:
        model.configure_route(Arm())

        with pytest.raises(RemoteModelError, match="name an env_index twice") as caught:
            model.predict(batch(0.5, 1.0), slots=Slots([0, 0], ["", ""], [0, 0], [False, False]))

        assert caught.value.is_recoverable
        assert model.predict(batch(0.5)).tolist() == [[1.0, 1.0]]


def test_our_own_server_describes_the_policy_and_its_times() -> None:
    def chunks(observations: Any) -> Any:
        return np.stack([doubled(observations)] * 4, axis=1)

    with (
        ModelServer(chunks, horizon=4, address=OPENPI, openpi_env=Arm()) as server,
        RemoteModel(f"openpi://{server.openpi_address}") as model,
    ):
        model.configure_route(Arm())
        facts = policy_of(shake_hands(ConnectOptions(model.address)))
        found = model.predict_chunk(batch(0.5))
        telemetry = model.last_telemetry()
        with pytest.raises(ConfigurationError, match="5 actions at once are more than"):
            model.configure_route(Arm(), horizon=5)

    assert (facts.kind, facts.horizon) == ("function", 4)
    assert "observation/state: Box (2) float32 within [-10, 10]" in facts.observation_space
    assert found.shape == (1, 4, 2)
    assert telemetry is not None
    assert telemetry.batch_rows == 1
    assert telemetry.forward_s > 0


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), "soon", None, [1]])
def test_times_that_are_no_numbers_are_left_out(odd: object) -> None:
    timing = {"infer_ms": 2.0, "queue_ms": odd, "batch_rows": odd, "policy_version": odd}
    with (
        small_server(lambda message: {**chunk(message), "server_timing": timing}) as address,
        RemoteModel(f"openpi://{address}") as model,
    ):
        model.configure_route(Arm())
        model.predict(batch(0.5))
        telemetry = model.last_telemetry()

    assert telemetry is not None
    assert (telemetry.forward_s, telemetry.queue_s) == (0.002, 0.0)
    assert (telemetry.policy_version, telemetry.batch_rows) == (-1, 0)


class Wide(Arm):
    """An arm with more joints."""

    action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)


def test_an_environment_that_the_metadata_contradicts_is_refused_when_a_route_is_opened() -> None:
    with (
        ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as server,
        RemoteModel(f"openpi://{server.openpi_address}") as model,
    ):
        with pytest.raises(RemoteModelError, match=r"has shape \[2\], the environment's \(7,\)"):
            model.configure_route(Wide())
        model.configure_route(Arm())

        assert model.predict(batch(0.5)).tolist() == [[1.0, 1.0]]


def test_without_a_description_a_result_of_another_shape_is_refused(other: str) -> None:
    with RemoteModel(other) as model:
        model.configure_route(Wide())

        with pytest.raises(CodecError, match=r"actions in the result has shape \(3, 2\)"):
            model.predict(batch(0.5))


def test_a_text_of_the_server_is_its_error_and_ends_the_session() -> None:
    with (
        small_server(lambda _: "Traceback ...\nValueError: no camera") as address,
        RemoteModel(f"openpi://{address}") as model,
    ):
        model.configure_route(Arm())
        with pytest.raises(RemoteModelError, match="ValueError: no camera") as caught:
            model.predict(batch(0.5))
        with pytest.raises(EndpointLostError, match="close it and open a new one"):
            model.predict(batch(0.5))

    assert not caught.value.is_recoverable


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (b"\xc1", "not msgpack"),
        ([1, 2], "no map"),
        ({"action": np.zeros((1, 2))}, "no 'actions', only: action"),
        ({"actions": np.full((1, 2), np.nan)}, "is NaN"),
    ],
)
def test_a_result_that_is_no_action_is_refused(result: Any, reason: str) -> None:
    with small_server(lambda _: result) as address, RemoteModel(f"openpi://{address}") as model:
        model.configure_route(Arm())

        with pytest.raises(CodecError, match=reason):
            model.predict(batch(0.5))


def test_a_server_that_does_not_answer_in_time_ends_the_session() -> None:
    with (
        small_server(lambda _: None) as address,
        RemoteModel(f"openpi://{address}", predict_timeout_s=0.05) as model,
    ):
        model.configure_route(Arm())
        with pytest.raises(EndpointTimeoutError, match="no answer in time"):
            model.predict(batch(0.5))
        with pytest.raises(EndpointTimeoutError):
            model.predict(batch(0.5))


def test_a_client_that_is_dropped_leaves_no_connection() -> None:
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as server:
        model = RemoteModel(f"openpi://{server.openpi_address}")
        model.configure_route(Arm())
        model.predict(batch(0.5))
        assert server.statistics().sessions.open == 1
        del model
        gc.collect()

        assert eventually(lambda: server.statistics().sessions.open == 0)


def test_a_session_that_has_timed_out_has_closed_its_connections() -> None:
    is_late = threading.Event()

    def late(observations: Any) -> Any:
        is_late.wait(TIMEOUT_S)
        return doubled(observations)

    with (
        ModelServer(late, address=OPENPI, openpi_env=Arm()) as server,
        RemoteModel(f"openpi://{server.openpi_address}", predict_timeout_s=0.05) as model,
    ):
        model.configure_route(Arm())
        with pytest.raises(EndpointTimeoutError):
            model.predict(batch(0.5))
        is_late.set()

        assert eventually(lambda: server.statistics().sessions.open == 0)


def test_closing_ends_requests_that_wait() -> None:
    asked = threading.Event()

    with small_server(lambda _: asked.set()) as address, ThreadPoolExecutor(1) as pool:
        model = RemoteModel(f"openpi://{address}")
        model.configure_route(Arm())
        waiting = pool.submit(model.predict, batch(0.5))
        assert asked.wait(TIMEOUT_S)
        model.close()
        with pytest.raises(EndpointClosedError):
            waiting.result(TIMEOUT_S)
        with pytest.raises(EndpointClosedError):
            model.predict(batch(0.5))
        model.close()


def test_a_closed_route_closes_its_connections() -> None:
    with (
        ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as server,
        RemoteModel(f"openpi://{server.openpi_address}") as model,
    ):
        model.configure_route(Arm(), route_id="one")
        model.configure_route(Arm(), route_id="two")
        model.predict(batch(0.5), route_id="one")
        model.predict(batch(0.5), route_id="two")
        assert server.statistics().sessions.open == 2
        model.close_route("one")

        assert eventually(lambda: server.statistics().sessions.open == 1)
        assert model.predict(batch(0.5), route_id="two").tolist() == [[1.0, 1.0]]


def test_a_message_above_the_servers_limit_is_named() -> None:
    with (
        ModelServer(doubled, address=OPENPI, openpi_env=Arm(), max_message_bytes=2**16) as server,
        RemoteModel(f"openpi://{server.openpi_address}") as model,
    ):
        model.configure_route(Arm())
        large = {**batch(0.5), "prompt": ["x" * 2**17]}

        with pytest.raises(EndpointError, match="larger than the limit of the server"):
            model.predict(large)


def test_nothing_but_an_openpi_server_is_taken_for_one() -> None:
    with pytest.raises(EndpointUnreachableError, match="nothing answers there"):
        RemoteModel(f"openpi://{free_address()}")
    with (
        ModelServer(doubled) as server,
        pytest.raises(EndpointUnreachableError, match="this is no openpi server"),
    ):
        RemoteModel(f"openpi://{server.address}")
    with (
        small_server(chunk, b"\xc1") as address,
        pytest.raises(EndpointUnreachableError, match="no openpi server: this is not msgpack"),
    ):
        RemoteModel(f"openpi://{address}")
    with (
        small_server(chunk, "hello") as address,
        pytest.raises(EndpointUnreachableError, match="'hello' in place of its metadata"),
    ):
        RemoteModel(f"openpi://{address}")


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, AccessDeniedError), (503, EndpointUnreachableError), (404, EndpointUnreachableError)],
)
def test_a_refused_connection_has_the_reason_of_the_server(
    status: int, error: type[EndpointError]
) -> None:
    def refuse(connection: Any, _: Request) -> Any:
        return connection.respond(http.HTTPStatus(status), "not today")

    with (
        small_server(chunk, process_request=refuse) as address,
        pytest.raises(error, match=rf"not today \(HTTP {status}\)"),
    ):
        RemoteModel(f"openpi://{address}")


def test_an_address_may_have_the_path_of_the_server() -> None:
    paths: list[str] = []

    def note(_: Any, request: Request) -> None:
        paths.append(request.path)

    with small_server(chunk, process_request=note) as address:
        RemoteModel(f"openpi://{address}/v1/realtime/robot/openpi").close()
        RemoteModel(f"openpi://{address}").close()

    assert paths == ["/v1/realtime/robot/openpi", "/"]


@needs_openssl
def test_the_token_travels_as_api_key_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    tls, trusted = ServerTls(*authority.sign("server")), ClientTls(authority.certificate)
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm(), token="s3cret", tls=tls) as server:
        address = f"openpi://{server.openpi_address}"
        with RemoteModel(address, token="s3cret", tls=trusted) as model:
            model.configure_route(Arm())
            assert model.predict(batch(0.5)).tolist() == [[1.0, 1.0]]
        with pytest.raises(AccessDeniedError, match="requires a token"):
            RemoteModel(address, token="wrong", tls=trusted)
        with pytest.raises(EndpointError):
            RemoteModel(address, token="s3cret")
        with pytest.raises(EndpointUnreachableError, match="TLS with it fails"):
            RemoteModel(address, token="s3cret", tls=ClientTls())


def test_addresses_and_options_that_mean_something_else_are_refused() -> None:
    with pytest.raises(AddressError, match="over TCP"):
        RemoteModel("openpi://unix:socket")
    with pytest.raises(EndpointUnreachableError, match=r": this is no .* isn't a valid URI: fragm"):
        RemoteModel("openpi://127.0.0.1:1/path#part")
    with pytest.raises(AddressError, match="is not an address"):
        RemoteModel("openpi:///path")
    with pytest.raises(ConfigurationError, match="openpi has no editions"):
        RemoteModel("openpi://127.0.0.1:1", edition_text="rlmesh-0.1.0b3")
    with pytest.raises(ConfigurationError, match="is a policy, since openpi serves nothing else"):
        RemoteEnv("openpi://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="is an environment, since dm_env_rpc"):
        RemoteModel("dm_env_rpc://127.0.0.1:1")


def test_evaluate_runs_the_policy_of_any_openpi_server(other: str) -> None:
    with EnvServer(Arm, num_envs=2) as env:
        result = evaluate(env.address, other, episodes=4, seed=1)

    # Twice the state before each of three steps: 0, 1, 2.
    assert [episode.episode_return for episode in result.episodes] == [6.0] * 4


def test_the_chunks_of_any_openpi_server_are_played(other: str) -> None:
    with EnvServer(Arm) as env, RemoteModel(other) as model:
        result = evaluate(env.address, other, episodes=2, seed=1, execution_horizon=3)
        with model.actions(Arm(), execution_horizon=3) as player:
            arm = Arm()
            observation, _ = arm.reset(seed=1)
            played = [player.act(observation).tolist() for _ in range(3)]

    # One chunk from the state 0: 0, 1, 2.
    assert [episode.episode_return for episode in result.episodes] == [3.0] * 2
    assert played == [[0, 0], [1, 1], [2, 2]]


def counting() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a policy that acts with the number of its requests on a connection."""
    own = threading.local()  # each connection has a thread

    def infer(message: dict[str, Any]) -> dict[str, Any]:
        own.number = getattr(own, "number", 0) + 1
        return {"actions": np.full((1, 2), float(own.number))}

    return infer


def test_a_lane_has_a_new_connection_in_each_episode() -> None:
    def slots(second: str, *resets: bool) -> Slots:
        return Slots(range(2), ["a", second], [0, 0], resets)

    with (
        small_server(counting(), {}) as address,
        RemoteModel(f"openpi://{address}") as model,
    ):
        model.configure_route(replace(contract_of(Arm()), num_envs=2))
        acted = [
            model.predict(batch(0.0, 0.0), slots=slots(*row))[:, 0].tolist()
            for row in [
                ("b", True, True),
                ("b", False, False),
                ("c", False, True),
                ("", False, False),
                ("c", False, False),
                ("d", False, False),
            ]
        ]

    assert acted == [[1, 1], [2, 2], [3, 1], [4, 2], [5, 3], [6, 1]]


def test_inspect_shows_no_replay_where_every_answer_is_a_chunk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ModelServer(doubled, horizon=4, address=OPENPI, openpi_env=Arm()) as server:
        assert main(["inspect", f"openpi://{server.openpi_address}"]) == 0

    found = capsys.readouterr().out
    assert "4 actions at once" in found
    assert "chunk replay" not in found


def test_inspect_shows_what_an_openpi_server_says(capsys: pytest.CaptureFixture[str]) -> None:
    with ModelServer(doubled, address=OPENPI, openpi_env=Arm()) as server:
        code = main(["inspect", f"openpi://{server.openpi_address}", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["service"], found["generation"]) == ("model", "openpi")
    assert found["health"] == "UNKNOWN"
    assert found["policy"]["kind"] == "function"
