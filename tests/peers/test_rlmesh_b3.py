"""A real peer: the published rlmesh 0.1.0b3 drives our endpoints, our clients drive its own.

It lives in a virtual environment of its own, which ``make`` builds. b3 implements an earlier text
of the edition, so each side needs the option to accept the other's. Where b3 does otherwise than
the text, the text counts for us. What it is known to do otherwise:

* The id of an episode that has ended stands in the response of the ending Step, and in
  NEXT_STEP environments an autoreset starts a tracked episode. The text has an empty entry from
  the end until the next Reset.
* An observation out of range is refused; the text has it delivered with a warning.
* A model's actions for several rows cannot be encoded; the text has one action row a slot.
* A Predict is refused where a slot names no episode; the text does not say that it must.

The wheel has no client for model endpoints, so that direction stays untested.
"""

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, ListenOptions, RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.model.remote_model import Slots
from rlmesh_ray.errors import EndpointLostError, HandshakeRefusedError, RemoteModelError
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.vector_infos import lane_info
from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_b3.peer import EDITION_TEXT, drive, serving
from tests.peers.rlmesh_b3.world import World


def seen(address: str, kind: str) -> dict[str, Any]:
    """Let b3's clients drive an endpoint; return what they saw."""
    done = drive(address, kind)
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(done.stdout)
    return reported


def lanes_apart(trace: list[Any], num_lanes: int) -> list[Any]:
    """Give each lane its own infos, without the two keys that b3's clients add."""
    apart = []
    for *rest, info in trace:
        own = {key: info[key] for key in info if key not in {"episode_ids", "completed_episodes"}}
        apart.append([*rest, [world.plain(lane_info(own, lane)) for lane in range(num_lanes)]])
    return apart


def cartpole_returns(seeds: list[int]) -> list[float]:
    """Play CartPole in this process, with the policy of the scripts."""
    env = gymnasium.make("CartPole-v1")
    returns = []
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        total, has_ended = 0.0, False
        while not has_ended:
            action = int(observation[2] + observation[3] > 0)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, has_ended = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


@pytest.fixture(scope="module")
def b3_env() -> Iterator[str]:
    with serving("serve_env", "World", "1") as address:
        yield address


@pytest.fixture(scope="module")
def b3_vector() -> Iterator[str]:
    with serving("serve_env", "World", "2") as address:
        yield address


@pytest.fixture(scope="module")
def b3_model() -> Iterator[str]:
    with serving("serve_model") as address:
        yield address


# --- our clients, its servers ------------------------------------------------------------


def test_our_client_sees_its_environment_as_it_is_in_process(b3_env: str) -> None:
    local, remote = World(), RemoteEnv(ConnectOptions(b3_env, edition_text=EDITION_TEXT))
    start: dict[str, Any] = {"seed": 3, "options": {"steps": 1}}

    theirs = world.play(remote, remote.observation_space, world.actions(5, 7), **start)
    frame = remote.render()
    remote.close()

    expected = world.play(local, local.observation_space, world.actions(5, 7), **start)
    assert remote.observation_space == local.observation_space
    assert remote.action_space == local.action_space
    assert remote.metadata == local.metadata
    assert theirs == expected
    assert sum(len(entry) == 2 for entry in expected) >= 3, "two episodes must end on the way"
    np.testing.assert_array_equal(np.asarray(frame), local.render())


def test_our_client_sees_its_vector_as_it_is_in_process(b3_vector: str) -> None:
    local = SyncVectorEnv([World] * 2)
    remote = RemoteVectorEnv(ConnectOptions(b3_vector, edition_text=EDITION_TEXT))

    theirs = world.play(remote, World.observation_space, world.batches(2, 7), seed=3)
    remote.close()

    expected = world.play(local, World.observation_space, world.batches(2, 7), seed=3)
    assert remote.num_envs == 2
    assert remote.single_observation_space == World.observation_space
    assert remote.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert theirs == expected
    assert any(True in entry[2] + entry[3] for entry in expected if len(entry) > 2)


def test_its_accounting_reaches_our_client(b3_env: str) -> None:
    client = EnvClient(ConnectOptions(b3_env, edition_text=EDITION_TEXT))
    first = client.reset(seeds=[3])
    rewards = []
    for action in world.actions(5, 4):
        result = client.step(stack(client.contract.action_space, [action]))
        rewards.append(result.rewards[0])
    again = client.reset()
    client.close()

    (episode,) = result.completed_episodes
    assert (episode.episode_id,) == first.episode_ids
    assert (episode.step_count, episode.seed, episode.truncated) == (4, 3, True)
    assert episode.cumulative_reward == sum(rewards)
    assert again.episode_ids != first.episode_ids


def test_our_client_asks_its_model(b3_model: str) -> None:
    env = gymnasium.make("CartPole-v1")
    returns = []
    with RemoteModel(b3_model, edition_text=EDITION_TEXT) as model:
        model.configure_route(env)
        for seed in (0, 1):
            observation, _ = env.reset(seed=seed)
            step, total, has_ended = 0, 0.0, False
            while not has_ended:
                slots = Slots([0], [f"episode {seed}"], [step], [step == 0])
                action = model.predict(observation[np.newaxis], slots=slots)
                observation, reward, terminated, truncated, _ = env.step(action[0])
                step, total, has_ended = step + 1, total + float(reward), terminated or truncated
            returns.append(total)
        model.close_route()

    assert returns == cartpole_returns([0, 1])
    assert min(returns) > 50


def test_an_error_of_its_model_that_is_not_recoverable_ends_our_session(b3_model: str) -> None:
    batch = np.zeros((2, 4), np.float32)
    slots = Slots([0, 1], ["a", "b"], [0, 0], [True, True])
    with RemoteModel(b3_model, edition_text=EDITION_TEXT) as model:
        model.configure_route(gymnasium.make_vec("CartPole-v1", 2))

        with pytest.raises(RemoteModelError) as caught:  # b3 cannot encode actions for two rows
            model.predict(batch, slots=slots)
        with pytest.raises(EndpointLostError, match="open a new one"):
            model.predict(batch, slots=slots)

    assert not caught.value.is_recoverable


@pytest.mark.parametrize("kind", ["env", "vector", "model"])
def test_its_servers_are_refused_unless_the_user_accepts_their_text(
    kind: str, request: pytest.FixtureRequest
) -> None:
    open_session = {"env": RemoteEnv, "vector": RemoteVectorEnv, "model": RemoteModel}[kind]
    with pytest.raises(HandshakeRefusedError) as caught:
        open_session(request.getfixturevalue(f"b3_{kind}"))

    assert "edition_text='rlmesh-0.1.0b3'" in str(caught.value)
    assert "--edition-text rlmesh-0.1.0b3" in str(caught.value)
    assert KNOWN_TEXTS[EDITION_TEXT][:12] in str(caught.value)
    assert caught.value.supported_editions == ("2026.06",)


def test_the_command_line_evaluates_its_model_in_its_environment(
    b3_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("serve_env", "CartPole-v1", "1") as env:
        code = main([
            "evaluate", "--json", "--episodes", "2", "--seed", "0",
            "--env", env, "--edition-text", EDITION_TEXT,
            "--model", b3_model, "--model-edition-text", EDITION_TEXT,
        ])  # fmt: skip

    assert code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last)["returns"] == cartpole_returns([0, 1])


def test_the_command_line_inspects_it(b3_env: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = main(["inspect", "--json", b3_env])
    reason = capsys.readouterr().err
    shown = main(["inspect", "--json", b3_env, "--edition-text", EDITION_TEXT])

    assert (refused, shown) == (1, 0)
    assert "--edition-text rlmesh-0.1.0b3" in reason
    assert json.loads(capsys.readouterr().out)["server_version"] == "0.1.0-beta.3"


# --- its clients, our servers ------------------------------------------------------------


def test_its_client_sees_our_environment_as_it_is_in_process() -> None:
    with EnvServer(World, address=ListenOptions(accept_edition_texts=[EDITION_TEXT])) as server:
        reported = seen(server.address, "env")

    local = World()
    expected = world.play(
        local, World.observation_space, world.actions(5, 7), seed=3, options={"steps": 1}
    )
    assert reported["id"] == "World"
    assert reported["metadata"] == local.metadata
    assert lanes_apart(reported["trace"], 1) == [[*rest, [info]] for *rest, info in expected]
    assert reported["frame"] == local.render().tolist()


@pytest.fixture(scope="module")
def seen_by_b3() -> dict[str, Any]:
    """Let b3's client drive our vector."""
    with EnvServer(
        World, num_envs=2, address=ListenOptions(accept_edition_texts=[EDITION_TEXT])
    ) as server:
        return seen(server.address, "vector")


def test_its_client_sees_our_vector_as_it_is_in_process(seen_by_b3: dict[str, Any]) -> None:
    local = SyncVectorEnv([World] * 2)
    expected = world.play(local, World.observation_space, world.batches(2, 7), seed=[3, 4])
    assert seen_by_b3["num_envs"] == 2
    assert lanes_apart(seen_by_b3["trace"], 2) == lanes_apart(expected, 2)


def test_its_client_sees_the_episode_ids_of_the_text(seen_by_b3: dict[str, Any]) -> None:
    trace = seen_by_b3["trace"]

    ids = [entry[-1]["episode_ids"] for entry in trace]
    ends = [entry[2][0] or entry[3][0] for entry in trace[1:]].index(True) + 1
    assert len(set(ids[0])) == 2
    assert ids[:ends] == [ids[0]] * ends
    assert {entry[0] for entry in ids[ends:]} == {""}, "empty until the next Reset"
    assert trace[ends][-1]["completed_episodes"] == 2


def test_its_model_runs_in_our_environment() -> None:
    with EnvServer(
        "CartPole-v1", address=ListenOptions(accept_edition_texts=[EDITION_TEXT])
    ) as server:
        reported = seen(server.address, "model")

    assert reported["returns"] == cartpole_returns([0, 1])


def test_its_clients_are_refused_unless_the_operator_accepts_their_text() -> None:
    with EnvServer(World) as server:
        done = drive(server.address, "env")

    assert done.returncode != 0
    assert "handshake failed" in done.stderr
    assert "--accept-edition-text rlmesh-0.1.0b3" in done.stderr
