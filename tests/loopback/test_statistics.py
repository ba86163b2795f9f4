"""An endpoint's statistics agree with what its clients did, over every transport."""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.errors import CapacityError, ConfigurationError, RemoteEnvError, RemoteModelError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.server.endpoint.log import JsonFormatter, short_name
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from tests.loopback.client_internals import (
    endpoints_give_up_after,
    vanish,
)
from tests.loopback.direct_sessions import has_direct_connection
from tests.loopback.dm_env_rpc_stream import DmStream
from tests.loopback.eventually import eventually

# A worker counts direct steps, whichever way they come.
TRANSPORTS = ["grpc", "shared_memory", pytest.param("tcp", marks=pytest.mark.nightly)]


def leave(client: EnvClient) -> None:
    """End a session as a client does that is killed."""
    client.direct_connector.close()
    vanish(client)


class Ends(gymnasium.Env[Any, Any]):
    """Every episode has three steps."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        return np.full(1, self._count, np.float32), 1.0, self._count == 3, False, {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_count_the_same_over_the_stream_and_past_the_endpoint(transport: str) -> None:
    with EnvServer(Ends, num_envs=2) as server:
        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0, transport=transport)
        client.reset()
        for _ in range(8):  # two episodes a lane, with the step that resets it after each
            client.step([np.zeros(2, np.int64)])
        assert has_direct_connection(client) is (transport != "grpc")
        during = server.statistics()
        client.close()
        after = server.statistics()

    for statistics in (during, after):
        assert statistics.steps == statistics.step_s.count == 8
        assert statistics.lane_steps == 16
        assert statistics.episodes == 4
        assert statistics.resets == 1
        assert statistics.errors == {}
    assert during.sessions.open == 1
    assert (after.sessions.open, after.sessions.opened, after.sessions.lost) == (0, 1, 0)
    assert during.uptime_s < after.uptime_s


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_past_an_episode_s_end_ends_no_other_one(transport: str) -> None:
    class StaysOver(Ends):
        def step(self, action: Any) -> Any:
            observation, reward, _, truncated, info = super().step(action)
            return np.minimum(observation, 10), reward, self._count >= 3, truncated, info

    with EnvServer(StaysOver, num_envs=1) as server:
        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0, transport=transport)
        for _ in range(2):
            client.reset()
            for _ in range(5):
                client.step([np.zeros(1, np.int64)])
        assert has_direct_connection(client) is (transport != "grpc")
        during = server.statistics()
        client.close()

    assert (during.steps, during.episodes) == (10, 2)


def test_a_lane_that_was_reset_alone_ends_again_and_the_others_do_not() -> None:
    with EnvServer(Ends, num_envs=2, autoreset="disabled") as server:
        env = RemoteVectorEnv(server.address)
        env.reset()
        for _ in range(3):
            env.step(np.zeros(2, np.int64))
        env.reset(options={"reset_mask": np.array([True, False])})
        for _ in range(3):
            env.step(np.zeros(2, np.int64))
        env.close()

        assert server.statistics().episodes == 3


def test_who_goes_without_close_is_lost_and_who_closes_is_not() -> None:
    with EnvServer(Ends) as server:
        with RemoteEnv(server.address) as env:
            env.reset()
        assert server.statistics().sessions.lost == 0

        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0)
        client.reset()
        leave(client)

        assert eventually(lambda: server.statistics().sessions.lost == 1)
        assert server.statistics().sessions.open == 0


def test_sessions_that_the_endpoint_ends_are_not_lost() -> None:
    server = EnvServer(Ends).start()
    client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0)
    client.reset()
    server.stop(grace_s=0.0)

    assert server.statistics().sessions.lost == 0
    leave(client)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("fault", "shown"), [(Fault.NAN_REWARD, "nan"), (Fault.INFINITE_REWARD, "-inf")]
)
def test_values_out_of_range_count_each_time_and_a_session_goes_on(
    transport: str, fault: Fault, shown: str
) -> None:
    with EnvServer(lambda: FaultyEnv(fault, at_step=2)) as server:
        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0, transport=transport)
        warned = []
        for _ in range(2):
            client.reset()
            client.step([np.zeros(1, np.int64)])
            result = client.step([np.zeros(1, np.int64)])
            assert result.rewards.astype(str).tolist() == [shown]
            warned.append(result.infos)
        during = server.statistics()
        client.close()

        text = f"reward: {shown} is not finite (lane 0)"
        assert lane_info(warned[0], 0) == {"rlmesh.conformance.warning": [text]}
        assert warned[1] == {}
        assert during.deviations == 2
        assert server.statistics().deviations == 2


def test_with_on_bad_value_a_bad_observation_costs_an_episode_and_no_session() -> None:
    env = functools.partial(FaultyEnv, Fault.NAN, at_step=2)
    with (
        EnvServer(env, num_envs=2, on_bad_value="truncate") as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as vector,
    ):
        vector.reset()
        vector.step(np.zeros(2, np.int64))
        observation, _, terminated, truncated, infos = vector.step(np.zeros(2, np.int64))

        assert observation.tolist() == [[np.float32(0.01)]] * 2
        assert terminated.tolist() == [False, False]
        assert truncated.tolist() == [True, True]
        assert "is NaN (lane 1, element (0,)), at step 2" in infos["rlmesh_ray.bad_value"][1]
        assert vector.step(np.zeros(2, np.int64))[0].tolist() == [[0.0], [0.0]]
        assert server.statistics().deviations == 2


def test_on_bad_value_takes_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="'zero' is not one of error, truncate"):
        EnvServer("CartPole-v1", on_bad_value="zero")


def test_a_session_without_a_place_is_refused() -> None:
    with EnvServer(Ends, max_sessions=1) as server, RemoteEnv(server.address) as env:
        env.reset()
        with pytest.raises(CapacityError):
            RemoteEnv(server.address).reset()

        assert server.statistics().sessions.refused == 1
        assert server.statistics().sessions.opened == 1


def test_a_crash_counts_as_an_error_costs_a_worker_and_is_logged_with_its_session(
    log: "Lines",
) -> None:
    crashes = functools.partial(FaultyEnv, Fault.EXIT, at_step=1)
    with EnvServer(crashes, _endpoint_id="faulty") as server, RemoteEnv(server.address) as env:
        env.reset()
        with pytest.raises(RemoteEnvError):
            env.step(0)
        env.reset()
        statistics = server.statistics()

    assert sum(statistics.errors.values()) == 1
    assert statistics.worker_restarts == 1
    assert statistics.resets == 2
    (begin,) = log.events("session_begins")
    (failure,) = log.events("environment_failed")
    assert (failure["endpoint_id"], failure["session"]) == ("faulty", begin["session"])
    assert failure["kind"] == "crashed"


def test_a_step_that_fails_over_shared_memory_is_an_error_and_no_step() -> None:
    with EnvServer(lambda: FaultyEnv(Fault.RAISE, at_step=5), num_envs=1) as server:
        client = EnvClient(
            ConnectOptions(server.address), step_timeout_s=30.0, transport="shared_memory"
        )
        client.reset()
        for _ in range(4):
            client.step([np.zeros(1, np.int64)])
        assert has_direct_connection(client)
        with pytest.raises(RemoteEnvError):
            client.step([np.zeros(1, np.int64)])
        client.close()
        statistics = server.statistics()

    assert statistics.steps == 4
    assert sum(statistics.errors.values()) == 1


def test_a_world_of_dm_env_rpc_counts_as_a_session() -> None:
    with EnvServer(Ends, num_envs=1) as server:
        with DmStream(server.address) as stream:
            stream.join(stream.create())
            for _ in range(4):  # the first begins an episode of three steps
                stream.step({1: 0})
            during = server.statistics()
        assert eventually(lambda: server.statistics().sessions.open == 0)
        after = server.statistics()

    assert (during.steps, during.episodes, during.resets) == (3, 1, 1)
    assert (during.sessions.open, during.sessions.opened) == (1, 1)
    assert after.sessions.lost == 0
    assert after.steps == during.steps


def test_predictions_count_by_batch() -> None:
    server = ModelServer(lambda observations: np.zeros(len(observations), np.int64))
    with server, RemoteModel(server.address) as model:
        model.configure_route(Ends())
        for _ in range(5):
            model.predict(np.zeros((1, 1), np.float32))
        during = server.statistics()
    after = server.statistics()

    assert during.items == during.queue_s.count == 5
    assert during.batches == during.batch_rows.count == during.forward_s.count
    assert during.batch_rows.total == during.rows == 5
    assert (during.sessions.open, during.routes) == (1, 1)
    assert (after.sessions.open, after.sessions.opened, after.sessions.lost) == (0, 1, 0)


# --- the log ---------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps what the package logs, as programs would read it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def warnings(self) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.texts) if line["level"] == "WARNING"]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(text) for text in self.texts]
        return [line for line in lines if line.get("event") == name]


@pytest.fixture
def log() -> Iterator[Lines]:
    logger, lines = logging.getLogger("rlmesh_ray"), Lines()
    former = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(former)
    logger.removeHandler(lines)


def test_a_session_s_begin_and_end_are_logged_with_both_names(log: Lines) -> None:
    with EnvServer(Ends, _endpoint_id="stairs-1") as server:
        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0)
        client.reset()
        client.step([np.zeros(1, np.int64)])
        secret = client.session_id
        client.close()
        with RemoteEnv(server.address) as env:
            env.reset()
        assert eventually(lambda: len(log.events("session_ends")) == 2)

    (begin, other), (end, _) = log.events("session_begins"), log.events("session_ends")
    assert begin["endpoint_id"] == end["endpoint_id"] == "stairs-1"
    assert begin["session"] == end["session"] == short_name(secret) != other["session"]
    assert begin["language"] == "rlmesh.protocol.v1"
    assert (end["cause"], end["steps"], end["level"]) == ("closed", 1, "INFO")
    assert [line["endpoint_id"] for line in log.events("serving")] == ["stairs-1"]
    assert len(log.events("stopped")) == 1
    assert not any(secret in text for text in log.texts)


def test_a_policy_s_sessions_are_logged_with_what_they_predicted(log: Lines) -> None:
    server = ModelServer(
        lambda observations: np.zeros(len(observations), np.int64), _endpoint_id="pilot"
    )
    with server, RemoteModel(server.address) as model:
        model.configure_route(Ends())
        model.predict(np.zeros((1, 1), np.float32))

    (end,) = log.events("session_ends")
    assert (end["endpoint_id"], end["predictions"], end["cause"]) == ("pilot", 1, "closed")


def test_a_worker_that_is_killed_over_a_line_is_logged_with_its_session(log: Lines) -> None:
    env = FaultyEnv(Fault.HANG, at_step=4)
    with EnvServer(lambda: env, _endpoint_id="hangs", _step_grace_s=0.1) as server:
        client = EnvClient(ConnectOptions(server.address), transport="shared_memory")
        client.reset()
        for _ in range(3):
            client.step([np.zeros(1, np.int64)])
        assert has_direct_connection(client)
        with endpoints_give_up_after(450), pytest.raises(RemoteEnvError):
            client.step([np.zeros(1, np.int64)])
        assert eventually(lambda: bool(log.warnings()))
        client.close()

    (begin,), (warning,) = log.events("session_begins"), log.warnings()
    assert "the worker is killed" in warning["message"]
    assert (warning["endpoint_id"], warning["session"]) == ("hangs", begin["session"])


def test_a_policy_that_fails_is_logged_for_the_session_that_asked(log: Lines) -> None:
    def picky(observations: Any) -> Any:
        if observations.max() > 5:
            raise ValueError(f"{observations.max():g} is too much")
        return np.zeros(len(observations), np.int64)

    with ModelServer(picky) as server:
        models = [RemoteModel(server.address) for _ in range(3)]
        for number, model in enumerate(models):
            model.configure_route(Ends())
            with pytest.raises(RemoteModelError):
                model.predict(np.full((1, 1), 10 + number, np.float32))
        names = [short_name(model.answer.capabilities[capabilities.SESSION]) for model in models]
        for model in models:
            model.close()

    assert [warning["session"] for warning in log.warnings()] == names
