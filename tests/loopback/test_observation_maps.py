"""Observation maps over real gRPC: at the server, at the client, in an evaluation."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, ObservationMap, RemoteModel, evaluate
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import policy_of, shake_hands
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, RemoteModelError

MAP = {"observation/image": "resize(pixels,4,4)", "state": "concat(agent_pos,gripper)"}
POLICY = """
def act():
    return lambda observations: observations["state"][:, :2]
"""


class Arm(gymnasium.Env[Any, Any]):
    """Three steps; the reward is the first element of the action."""

    observation_space = spaces.Dict(
        {
            "agent_pos": spaces.Box(-9, 9, (2,), np.float32),
            "gripper": spaces.Box(0, 1, (), np.float32),
            "pixels": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        }
    )
    action_space = spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observation(), float(action[0]), self._step == 3, False, {}

    def _observation(self) -> Any:
        return {
            "agent_pos": np.array([self._step, 5], np.float32),
            "gripper": np.array(0.5, np.float32),
            "pixels": np.full((8, 8, 3), 7, np.uint8),
        }


class Spy:
    """A policy function that acts with ``state`` and keeps its observations."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, observations: Any) -> Any:
        self.seen.append(observations)
        return observations["state"][:, :2]


def batch() -> Any:
    observation, _ = Arm().reset()
    return {key: value[np.newaxis] for key, value in observation.items()}


def check_mapped(observations: Any) -> None:
    assert list(observations) == ["observation", "state"]
    assert (observations["observation"]["image"] == np.full((1, 4, 4, 3), 7)).all()
    np.testing.assert_array_equal(observations["state"], np.array([[0, 5, 0.5]], np.float32))


def test_a_server_maps_what_clients_send() -> None:
    spy = Spy()

    with ModelServer(spy, observation_map=MAP) as server, RemoteModel(server.address) as model:
        model.configure_route(Arm())
        actions = model.predict(batch())
        facts = policy_of(shake_hands(ConnectOptions(server.address)))

    check_mapped(spy.seen[-1])
    np.testing.assert_array_equal(actions, [[0, 5]])
    assert facts.observation_map == (
        "observation/image = resize(pixels,4,4): uint8 (8, 8, 3) -> uint8 (4, 4, 3)",
        "state = concat(agent_pos,gripper): float32 (2,), float32 () -> float32 (3,)",
    )


def test_a_client_maps_what_it_sends() -> None:
    spy = Spy()

    with ModelServer(spy) as server, RemoteModel(server.address) as model:
        model.configure_route(Arm(), observation_map=MAP)
        actions = model.predict(batch())
        check_mapped(spy.seen[-1])
        model.configure_route(Arm(), route_id="plain", observation_map=["state=agent_pos"])
        model.predict(batch(), route_id="plain")
        model.close_route()
        model.configure_route(Arm(), observation_map=None)
        with pytest.raises(RemoteModelError, match="KeyError"):
            model.predict(batch())

    assert list(spy.seen[-2]) == ["state"]
    np.testing.assert_array_equal(actions, [[0, 5]])


def test_a_map_that_does_not_fit_is_refused_when_the_route_is_configured() -> None:
    wrong = ["state=resize(agent_pos,4,4)"]

    with ModelServer(Spy(), observation_map=wrong) as server, RemoteModel(server.address) as model:
        with pytest.raises(RemoteModelError, match=r"takes uint8 images .* leave resize out"):
            model.configure_route(Arm())
        with pytest.raises(ContractMismatchError, match="takes uint8 images"):
            model.configure_route(Arm(), observation_map=wrong)
        with pytest.raises(ContractMismatchError, match="did you mean pixels"):
            model.configure_route(Arm(), observation_map=["x=pixel"])
        with pytest.raises(ConfigurationError, match="there is no verb"):
            model.configure_route(Arm(), observation_map=["x=eval(pixels)"])


class Sum(torch.nn.Module):
    """Remembers the sum of the first elements of ``state``, and acts with a multiple of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def initial_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def forward(self, observations: Any, state: torch.Tensor) -> Any:
        total = state + observations["state"][:, :1]
        return (total * self.factor).repeat(1, 2), total


def test_a_policy_with_memory_keeps_it_and_takes_new_weights() -> None:
    ones = batch() | {"agent_pos": np.ones((1, 2), np.float32)}

    with ModelServer(Sum(), observation_map=MAP) as server, RemoteModel(server.address) as model:
        model.configure_route(Arm())
        actions = [model.predict(ones)[0, 0] for _ in range(2)]
        server.set_weights({"factor": torch.full((1,), 2.0)})
        actions.append(model.predict(ones)[0, 0])
        model.close_route()
        model.configure_route(Arm())
        actions.append(model.predict(ones)[0, 0])

    assert actions == [1, 2, 6, 2]


@pytest.mark.parametrize("is_served", [True, False])
def test_an_evaluation_maps_the_observations_of_its_environment(is_served: bool) -> None:
    spy = Spy()

    with EnvServer(Arm) as env, ModelServer(spy) as server:
        model = server.address if is_served else spy
        result = evaluate(env.address, model, episodes=2, observation_map=ObservationMap(MAP))
        with pytest.raises(ContractMismatchError, match="no such leaf"):
            evaluate(env.address, model, episodes=1, observation_map=["state=position"])

    check_mapped(spy.seen[0])
    assert result.return_mean == 0 + 1 + 2


# --- commands --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mapped_policy_of_a_test.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def options() -> list[str]:
    return [option for key, source in MAP.items() for option in ("--map", f"{key}={source}")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


@pytest.mark.usefixtures("folder")
def test_evaluate_maps_for_checkpoints_and_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--episodes", "1", "--env"]

    with EnvServer(Arm) as env, ModelServer(Spy()) as server:
        local = run(
            capsys, *command, env.address, "--model", "mapped_policy_of_a_test:act", *options()
        )
        remote = run(capsys, *command, env.address, "--model", server.address, *options())

    assert (local[0], remote[0]) == (0, 0)


@pytest.mark.parametrize(
    "command",
    [
        ["serve-model", "mapped_policy_of_a_test:act"],
        ["evaluate", "--env", "127.0.0.1:1", "--model", "mapped_policy_of_a_test:act"],
    ],
)
@pytest.mark.parametrize(
    ("option", "cause"),
    [
        ("state=gripp(er)", "there is no verb gripp"),
        ("state", "write KEY=SOURCE"),
        ("x=normalise(a,none.json)", "none.json cannot be read (FileNotFoundError"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_map_is_a_usage_error(
    command: list[str], option: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, *command, "--map", option)

    assert code == 2
    assert cause in text


def test_inspect_shows_the_map(capsys: pytest.CaptureFixture[str]) -> None:
    with ModelServer(Spy(), observation_map=MAP) as server:
        code, text = run(capsys, "inspect", server.address)

    assert code == 0
    assert "observation/image = resize(pixels,4,4): ? -> ?" in text
    assert "state = concat(agent_pos,gripper): ?, ? -> ?" in text
