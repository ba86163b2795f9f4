"""Our clients, and endpoints of the released rlmesh 0.1.0, which know nothing of us.

It lives in a virtual environment of its own, which ``make`` builds. What it does otherwise than
our endpoints do, and no client can mend:

* An environment that raises, or observes NaN, ends the session; ours goes on after a Reset.
* A step that hangs is answered when it is done, and not at its deadline.
* Infos lose the dtypes of their arrays.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv, evaluate
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.model.remote_model import Slots
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    ContractMismatchError,
    EndpointLostError,
    EndpointTimeoutError,
    RemoteEnvError,
    RemoteModelError,
)
from rlmesh_ray.testing.equality import assert_identical
from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_b3.world import World
from tests.peers.rlmesh_released import echo
from tests.peers.rlmesh_released.peer import TIMEOUT_S, serving
from tests.peers.rlmesh_released.torques import HORIZON, torques
from tests.peers.rlmesh_released.trouble import PLAIN_STEPS, Deed, Trouble

pytestmark = pytest.mark.slow


def endpoint(name: str, kind: str, num_envs: int = 1) -> Any:
    return serving("serve_env", name, kind, num_envs)


def balance(observations: Any) -> Any:
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def cartpole_returns(seeds: range) -> list[float]:
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


def command_line(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rlmesh_ray", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


# --- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", echo.SPACES)
def test_values_of_every_space_arrive_bit_for_bit(name: str) -> None:
    local = echo.Echo(name)
    with endpoint(f"echo:{name}", "single") as address:
        remote = RemoteEnv(address)
        first, _ = remote.reset(seed=5)
        observed = [remote.step(value)[0] for value in echo.samples(name, 4)]
        remote.close()

    assert remote.observation_space == local.observation_space
    assert remote.action_space == local.action_space
    assert_identical(
        world.reported(local.observation_space, first), _reported(local, local.reset(seed=5))
    )
    for seen, sent in zip(observed, echo.samples(name, 4), strict=True):
        _assert_same(local.observation_space, seen, sent)


# Its vectors cannot encode observations of Tuple spaces.
VECTORS = [
    (kind, name)
    for name, space in echo.SPACES.items()
    for kind in ("vector", "lanes")
    if kind == "lanes" or not isinstance(space, gymnasium.spaces.Tuple)
]


@pytest.mark.parametrize(("kind", "name"), VECTORS)
def test_batches_of_every_space_arrive_bit_for_bit(kind: str, name: str) -> None:
    with endpoint(f"echo:{name}", kind, 2) as address:
        remote = RemoteVectorEnv(address)
        remote.reset(seed=5)
        observed = [remote.step(batch)[0] for batch in _batches(kind, name)]
        remote.close()

    for seen, sent in zip(observed, _batches(kind, name), strict=True):
        _assert_same(echo.SPACES[name], seen, sent)


def _batches(kind: str, name: str) -> list[Any]:
    batches = echo.batches(name, 2, 2)
    for batch in batches:
        if (kind, name) == ("vector", "boxes"):
            batch["uint64"] >>= 1  # its vectors refuse integers from 2**63 on
    return batches


def _reported(env: echo.Echo, start: tuple[Any, Any]) -> Any:
    return world.reported(env.observation_space, start[0])


def _assert_same(space: gymnasium.Space[Any], seen: Any, sent: Any) -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        for key, part in space.spaces.items():
            _assert_same(part, seen[key], sent[key])
    elif isinstance(space, gymnasium.spaces.Tuple):
        for index, part in enumerate(space.spaces):
            _assert_same(part, seen[index], sent[index])
    elif isinstance(space, gymnasium.spaces.Text):
        assert seen == sent
    else:
        assert_identical(seen, np.asarray(sent, space.dtype))


# --- environments --------------------------------------------------------------------------


def test_its_environment_is_seen_as_it_is_in_process() -> None:
    local = World()
    start: dict[str, Any] = {"seed": 3, "options": {"steps": 1}}
    with endpoint("World", "single") as address:
        remote = RemoteEnv(address)
        theirs = world.play(remote, remote.observation_space, world.actions(5, 7), **start)
        frame = remote.render()
        remote.close()

    expected = world.play(local, local.observation_space, world.actions(5, 7), **start)
    assert remote.metadata == local.metadata
    assert theirs == expected
    assert sum(len(entry) == 2 for entry in expected) >= 3, "two episodes must end on the way"
    np.testing.assert_array_equal(np.asarray(frame), local.render())


def test_its_vector_is_seen_as_it_is_in_process() -> None:
    local = SyncVectorEnv([Trouble] * 3)
    deeds = [[Deed.STEP, Deed.STEP, Deed.SUCCEED], *[[Deed.STEP] * 3] * PLAIN_STEPS]
    batches = [np.array(row) for row in deeds]
    with endpoint("Trouble", "vector", 3) as address:
        remote = RemoteVectorEnv(address)
        assert remote.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        started = remote.reset(seed=7)
        steps = [remote.step(batch) for batch in batches]
        remote.close()

    assert_identical(started, local.reset(seed=7))
    for seen, batch in zip(steps, batches, strict=True):
        assert_identical(seen, local.step(batch))


def test_infos_of_its_lanes_come_in_the_form_of_vectors() -> None:
    with endpoint("Trouble", "lanes", 3) as address:
        remote = RemoteVectorEnv(address)
        _, started = remote.reset(seed=7)
        infos = remote.step(np.array([Deed.STEP, Deed.SUCCEED, Deed.STEP]))[-1]
        mask = {"reset_mask": np.array([True, False, True])}
        _, restarted = remote.reset(seed=[1, 2, 3], options=mask)
        mask = {"reset_mask": np.array([False, True, False])}
        _, alone = remote.reset(seed=[4, 5, 6], options=mask)
        remote.close()

    every, one = np.ones(3, bool), np.array([False, True, False])
    assert_identical(started, {"seed": np.array([7, 8, 9]), "_seed": every})
    assert_identical(
        infos,
        {"steps": np.ones(3, int), "_steps": every, "is_success": one, "_is_success": one},
    )
    assert_identical(restarted, {"seed": np.array([1, 0, 3]), "_seed": ~one})
    assert_identical(alone, {"seed": np.array([0, 5, 0]), "_seed": one})


def test_single_lanes_of_its_lanes_are_reset_and_the_others_stay_as_they_are() -> None:
    with endpoint("Trouble", "lanes", 3) as address:
        client = EnvClient(ConnectOptions(address))
        first = client.reset(seeds=[1, 2, 3])
        stepped = client.step([np.full(3, Deed.STEP)])
        again = client.reset(seeds=[9], lanes=[1])
        after = client.step([np.full(3, Deed.STEP)])
        client.close()

    np.testing.assert_array_equal(stepped.observation[0], [[1, 1], [2, 1], [3, 1]])
    np.testing.assert_array_equal(again.observation[0], [[1, 1], [9, 0], [3, 1]])
    np.testing.assert_array_equal(after.observation[0], [[1, 2], [9, 1], [3, 2]])
    assert again.episode_ids[::2] == first.episode_ids[::2]
    assert again.episode_ids[1] not in first.episode_ids
    assert after.episode_ids == again.episode_ids
    assert after.completed_episodes == (), "an episode that a reset cuts off is forgotten"


def test_lanes_of_its_vectors_cannot_be_reset_alone() -> None:
    with endpoint("Trouble", "vector", 2) as address:
        remote = RemoteVectorEnv(address)
        remote.reset(seed=7)
        with pytest.raises(ConfigurationError, match="resets all of its 2 lanes or none"):
            remote.reset(seed=7, options={"reset_mask": np.array([True, False])})
        remote.step(np.full(2, Deed.STEP))
        remote.close()


def test_episodes_are_those_of_the_edition_even_if_the_environment_counts_others() -> None:
    with endpoint("Trouble", "vector", 2) as address:
        client = EnvClient(ConnectOptions(address))
        first = client.reset(seeds=[3, 4])
        reported = [
            client.step([np.array([Deed.SUCCEED if step == 1 else Deed.STEP, Deed.STEP])])
            for step in range(2 * PLAIN_STEPS + 2)
        ]
        again = client.reset()
        client.close()

    episodes = [episode for result in reported for episode in result.completed_episodes]
    assert [episode.episode_id for episode in episodes] == list(first.episode_ids)
    assert [(each.step_count, each.seed) for each in episodes] == [(2, 3), (PLAIN_STEPS, 4)]
    assert [each.cumulative_reward for each in episodes] == [3.0, 15.0]
    assert [(each.terminated, each.truncated) for each in episodes] == [
        (True, False),
        (False, True),
    ]
    assert episodes[0].final_info["is_success"] is True
    assert [result.episode_ids for result in reported[:2]] == [
        first.episode_ids,
        ("", first.episode_ids[1]),
    ]
    assert {result.episode_ids for result in reported[PLAIN_STEPS:]} == {("", "")}
    assert sum(result.terminated.sum() + result.truncated.sum() for result in reported) > 2
    assert len({*first.episode_ids, *again.episode_ids}) == 4


def test_values_out_of_range_arrive_with_a_warning_in_our_words() -> None:
    with endpoint("Trouble", "single") as address:
        remote = RemoteEnv(address)
        remote.reset(seed=1)
        observation, *_, info = remote.step(int(Deed.OBSERVE_BEYOND))
        remote.close()

    assert observation[0] == 1000
    (warning,) = info["rlmesh.conformance.warning"]
    assert warning.startswith("observation: ")
    assert "bound" in warning


# --- what goes wrong -----------------------------------------------------------------------


def test_an_action_that_it_refuses_changes_nothing() -> None:
    with endpoint("Trouble", "single") as address:
        client = EnvClient(ConnectOptions(address))
        client.reset(seeds=[1])
        client.step([np.array([Deed.STEP])])
        with pytest.raises(RemoteEnvError) as caught:
            client.step([np.array([99])])
        result = client.step([np.array([Deed.STEP])])
        client.close()

    assert (caught.value.code, caught.value.is_recoverable) == ("INVALID_ACTION", True)
    np.testing.assert_array_equal(result.observation[0], [[1, 2]])


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (Deed.RAISE, "fell over"),
        (Deed.OBSERVE_NAN, "(?i)nan"),
        (Deed.TELL_A_HUGE_NUMBER, "step failed"),
    ],
)
def test_an_error_that_ends_its_session_ends_ours(deed: Deed, words: str) -> None:
    with endpoint("Trouble", "single") as address:
        remote = RemoteEnv(address)
        remote.reset(seed=1)
        with pytest.raises(RemoteEnvError, match=words) as caught:
            remote.step(int(deed))
        with pytest.raises(EndpointLostError, match="open a new one"):
            remote.reset()
        remote.close()
        again = RemoteEnv(address)
        again.reset(seed=1)
        again.close()

    assert (caught.value.code, caught.value.is_recoverable) == ("INTERNAL", False)


def test_a_server_that_dies_is_an_endpoint_that_is_lost() -> None:
    with endpoint("Trouble", "single") as address:
        remote = RemoteEnv(address)
        remote.reset(seed=1)
        with pytest.raises(EndpointLostError):
            remote.step(int(Deed.EXIT))
        remote.close()


def test_a_step_that_hangs_is_given_up_in_time() -> None:
    with endpoint("Trouble", "single") as address:
        remote = RemoteEnv(address, step_timeout_s=2.0)
        remote.reset(seed=1)
        with pytest.raises(EndpointTimeoutError):
            remote.step(int(Deed.HANG))
        remote.close()


def test_it_holds_one_session_at_a_time_and_another_after_it() -> None:
    with endpoint("Trouble", "single") as address:
        first = RemoteEnv(address)
        with pytest.raises(CapacityError, match="end that session"):
            RemoteEnv(address)
        first.close()
        second = RemoteEnv(address)
        second.reset()
        second.close()


def test_a_vector_is_no_single_environment() -> None:
    with endpoint("Trouble", "vector", 2) as address:
        with pytest.raises(ContractMismatchError, match="2 lanes"):
            RemoteEnv(address)
        RemoteVectorEnv(address).close()


def test_what_it_does_not_offer_is_refused_here() -> None:
    with endpoint("Trouble", "single") as address:
        with pytest.raises(ConfigurationError, match="no shared memory"):
            RemoteEnv(address, transport="shared_memory")
        with pytest.raises(ConfigurationError, match="leave out edition_text"):
            RemoteEnv(ConnectOptions(address, edition_text="rlmesh-0.1.0b3"))
        remote = RemoteEnv(address)
        with pytest.raises(ConfigurationError, match="call nothing"):
            remote.call("anything")
        remote.close()


def test_its_unix_sockets_are_dialed_as_it_writes_them(tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/env.sock"
    with serving("serve_env", "CartPole-v1", "single", 1, where) as address:
        for dialed in (address, f"unix:{tmp_path}/env.sock"):
            remote = RemoteEnv(dialed)
            observation, _ = remote.reset(seed=3)
            remote.close()

    np.testing.assert_array_equal(observation, gymnasium.make("CartPole-v1").reset(seed=3)[0])


# --- models --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with serving("serve_model", "Balance") as address:
        yield address


def test_its_model_acts_for_single_rows_and_batches(model: str) -> None:
    observations = np.random.default_rng(3).normal(size=(64, 4)).astype(np.float32)
    with RemoteModel(model) as remote:
        remote.configure_route(gymnasium.make("CartPole-v1"))
        alone = [remote.predict(row[np.newaxis])[0] for row in observations[:8]]
        remote.configure_route(gymnasium.make_vec("CartPole-v1", 64), route_id="wide")
        together = remote.predict(observations, route_id="wide")
        telemetry = remote.last_telemetry("wide")
        remote.close_route("wide")
        remote.predict(observations[:1])

    assert_identical(together, balance(observations))
    assert alone == balance(observations)[:8].tolist()
    assert telemetry is not None
    assert telemetry.forward_s > 0
    assert telemetry.queue_s > 0
    assert (telemetry.policy_version, telemetry.batch_rows, telemetry.server) == (-1, 0, "")


def test_its_model_hears_where_episodes_begin() -> None:
    batch = np.zeros((1, 4), np.float32)
    with serving("serve_model", "Counter") as address, RemoteModel(address) as remote:
        remote.configure_route(gymnasium.make("CartPole-v1"))

        def act(episode: str, step: int) -> int:
            slots = Slots([0], [episode], [step], [step == 0])
            return int(remote.predict(batch, slots=slots)[0])

        named = [[act(name, step) for step in range(3)] for name in ("a", "b", "b")]
        unnamed = [[act("", step) for step in range(3)] for _ in range(2)]

    assert named == [[1, 0, 1]] * 3
    assert unnamed == [[1, 0, 1]] * 2


SWINGS = np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)


def test_its_model_s_chunks_are_those_of_ours_bit_for_bit() -> None:
    envs = gymnasium.make_vec("Pendulum-v1", 4)
    with (
        serving("serve_model", "Swings") as address,
        RemoteModel(address) as theirs,
        ModelServer(torques, horizon=HORIZON) as server,
        RemoteModel(server.address) as ours,
    ):
        found = []
        for model in (theirs, ours):
            model.configure_route(envs)
            model.configure_route(envs, route_id="some", horizon=2)
            found.append([model.predict_chunk(SWINGS, route_id=id) for id in ("default", "some")])
        telemetry = theirs.last_telemetry()
        with pytest.raises(ConfigurationError, match="which is 5: lower the horizon"):
            theirs.configure_route(envs, horizon=6)

    for theirs_found, ours_found, horizon in zip(*found, (HORIZON, 2), strict=True):
        assert theirs_found.shape == (4, horizon, 1)
        assert_identical(theirs_found, ours_found)
        assert_identical(theirs_found, torques(SWINGS)[:, :horizon])
    assert telemetry is not None
    assert telemetry.forward_s > 0


def test_its_model_that_declares_no_chunk_gives_as_many_as_it_is_asked_for() -> None:
    env = gymnasium.make("Pendulum-v1")
    with serving("serve_model", "Undeclared") as address, RemoteModel(address) as model:
        found = {}
        for horizon in (None, 3, 1024):
            model.configure_route(env, horizon=horizon)
            found[horizon] = model.predict_chunk(SWINGS[:1])

    for horizon, count in ((None, 1), (3, 3), (1024, HORIZON)):
        assert_identical(found[horizon], torques(SWINGS[:1])[:, :count])


def test_its_model_hears_where_episodes_of_chunks_begin() -> None:
    with serving("serve_model", "Counter") as address, RemoteModel(address) as remote:
        remote.configure_route(gymnasium.make_vec("CartPole-v1", 2), horizon=4)

        def act(*resets: bool) -> list[int]:
            lanes = range(len(resets))
            slots = Slots(lanes, [""] * len(lanes), [0] * len(lanes), resets)
            batch = np.zeros((len(lanes), 4), np.float32)
            return [int(chunk[0]) for chunk in remote.predict_chunk(batch, slots=slots)]

        # It counts the rows of all lanes, until an episode of any of them ends.
        found = [act(True, True), act(False), act(True, False), act(False, False)]

    assert found == [[1, 0], [1], [1, 0], [1, 0]]


@pytest.mark.parametrize("method", ["predict", "predict_chunk"])
def test_its_model_that_cannot_act_says_so(method: str) -> None:
    with serving("serve_model", "Raises") as address, RemoteModel(address) as remote:
        remote.configure_route(gymnasium.make("CartPole-v1"), horizon=2)
        with pytest.raises(RemoteModelError, match="no idea") as caught:
            getattr(remote, method)(np.zeros((1, 4), np.float32))

    assert caught.value.code == "INTERNAL"


def test_its_model_is_reached_over_a_unix_socket(tmp_path: Path) -> None:
    with (
        serving("serve_model", "Balance", f"unix://{tmp_path}/model.sock") as address,
        RemoteModel(address) as remote,
    ):
        remote.configure_route(gymnasium.make("CartPole-v1"))
        actions = remote.predict(np.ones((1, 4), np.float32))

    assert actions.tolist() == [1]


# --- evaluation, and the command line ------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "num_envs"), [("single", 1), ("vector", 3), ("lanes", 3), ("ours", 2)]
)
def test_models_of_both_are_evaluated_in_environments_of_both(
    kind: str, num_envs: int, model: str
) -> None:
    expected = cartpole_returns(range(4))
    with (
        (
            EnvServer("CartPole-v1", num_envs=num_envs)
            if kind == "ours"
            else endpoint("CartPole-v1", kind, num_envs)
        ) as served,
        ModelServer(balance) as ours,
    ):
        address = served.address if isinstance(served, EnvServer) else served
        for policy in (model, ours.address, balance):
            result = evaluate(address, policy, episodes=4, seed=0)
            assert [episode.episode_return for episode in result.episodes] == expected


def test_endpoints_of_both_are_evaluated_together(model: str) -> None:
    with (
        endpoint("CartPole-v1", "single") as single,
        endpoint("CartPole-v1", "lanes", 2) as lanes,
        EnvServer("CartPole-v1") as ours,
        ModelServer(balance) as our_model,
    ):
        result = evaluate(
            [single, lanes, ours.address], [model, our_model.address], episodes=12, seed=0
        )

    assert [each.episode_return for each in result.episodes] == cartpole_returns(range(12))
    assert {episode.endpoint for episode in result.episodes} <= {single, lanes, ours.address}


def test_the_command_line_evaluates_its_model_in_its_environment(model: str) -> None:
    with endpoint("CartPole-v1", "vector", 2) as env:
        done = command_line(
            "evaluate", "--json", "--episodes", "3", "--seed", "0", "--env", env, "--model", model
        )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["returns"] == cartpole_returns(range(3))


def test_the_command_line_shows_what_is_spoken_where(model: str) -> None:
    with endpoint("World", "lanes", 2) as theirs, EnvServer("CartPole-v1") as ours:
        shown = command_line("inspect", theirs)
        reported = [
            json.loads(command_line("inspect", "--json", address).stdout)
            for address in (theirs, ours.address, model)
        ]

    assert [each["generations"] for each in reported] == [
        ["rlmesh-wire-v1"],
        ["rlmesh.protocol.v1", "rlmesh-wire-v1", "dm_env_rpc.v1"],
        ["rlmesh-wire-v1"],
    ]
    assert [each["service"] for each in reported] == ["env", "env", "model"]
    assert reported[0]["server_version"] == "0.1.0"
    assert "rlmesh-wire-v1" in shown.stdout
