"""Remote environments are gymnasium's: its checker and its wrappers take them for their own."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Discrete
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeAwareObservation
from gymnasium.wrappers.vector import DictInfoToList, NormalizeObservation, RecordEpisodeStatistics

from rlmesh_ray import (
    DmEnvRpcSettings,
    EnvServer,
    RemoteEnv,
    RemoteModel,
    RemoteVectorEnv,
    evaluate,
)
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    ConfigurationWarning,
    ConformanceError,
    ContractMismatchError,
    EndpointClosedError,
    LocalProtocolError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.spaces.gym_conversion import env_spec
from rlmesh_ray.testing.equality import assert_identical

NUM_LANES = 3
NUM_STEPS = 60


def cartpoles() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_LANES)


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=NUM_LANES) as server:
        yield server


@pytest.fixture(scope="module")
def pole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1") as server:
        yield server


@pytest.fixture
def remote(server: EnvServer) -> Iterator[RemoteVectorEnv]:
    env = RemoteVectorEnv(server.address)
    yield env
    env.close()


# The checker's advice on how to choose bounds is for the environments' authors.
@pytest.mark.filterwarnings("ignore:.*(For Box action spaces|infinity):UserWarning")
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Blackjack-v1"])
def test_gymnasiums_checker_finds_nothing_wrong(env_id: str) -> None:
    with EnvServer(env_id) as server:
        env = RemoteEnv(server.address)

        check_env(env, skip_render_check=True)

        env.close()


@pytest.mark.filterwarnings("ignore:.*infinity:UserWarning")
def test_a_spec_opens_sessions_where_gymnasium_makes_environments(pole: EnvServer) -> None:
    with RemoteEnv(pole.address) as env:
        # One for each render mode that the environment has: the client cannot choose.
        with pytest.warns(ConfigurationWarning, match="a client cannot choose it") as warned:
            check_env(env)
        assert sum("render_mode=None" in str(each.message) for each in warned) == 2
        assert str(TimeAwareObservation(env)) == "<TimeAwareObservation<RemoteEnv<CartPole-v1>>>"
        with gymnasium.make(env.spec, max_episode_steps=3) as again:
            again.reset(seed=0)
            assert [again.step(0)[3] for _ in range(3)] == [False, False, True]
            assert isinstance(again.unwrapped, RemoteEnv)


def test_what_the_endpoint_does_not_tell_or_gymnasium_does_not_take_is_no_spec() -> None:
    with (
        EnvServer(Stray, num_envs=2) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as env,
    ):
        assert env.spec is None
        contract = env.contract

    assert str(env) == "RemoteVectorEnv(num_envs=2)"
    long = f"Own-v{'9' * 5000}"
    for fields in ({"max_episode_steps": 5}, {"id": "not an id!"}, {"id": long}, {"id": 5}):
        assert env_spec(replace(contract, spec=fields)) is None
    spec = env_spec(replace(contract, spec={"id": "Own-v0", "kwargs": {}, "max_episode_steps": ""}))
    assert spec == EnvSpec("Own-v0")


@pytest.mark.parametrize("wrapper", [RecordEpisodeStatistics, NormalizeObservation, DictInfoToList])
def test_vector_wrappers_give_what_they_give_round_a_local_vector(
    remote: RemoteVectorEnv, wrapper: type[gymnasium.vector.VectorWrapper]
) -> None:
    ours: Any = wrapper(remote)
    theirs: Any = wrapper(cartpoles())
    theirs.action_space.seed(0)
    assert_identical(ours.reset(seed=5), theirs.reset(seed=5))

    for _ in range(NUM_STEPS):
        actions = theirs.action_space.sample()
        mine, local = ours.step(actions), theirs.step(actions)
        for infos in (mine[4], local[4]):
            if isinstance(infos, dict):  # the wrapper's clock
                infos.get("episode", {}).pop("t", None)
        assert_identical(mine, local)
    theirs.close()


class Stray(gymnasium.Env[Any, Any]):
    """Leaves its bounds in its second step, if its seed is odd."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        is_stray = self.steps == 2 and self.np_random_seed % 2
        return np.full(2, 5.0 * is_stray, np.float32), 0.0, False, False, {"steps": self.steps}


@pytest.mark.parametrize("path", ["shared_memory", "grpc", "dm_env_rpc"])
def test_a_warning_is_an_info_of_the_lane_that_it_is_about(path: str) -> None:
    with EnvServer(Stray, num_envs=NUM_LANES) as server:
        if path == "dm_env_rpc":
            settings = DmEnvRpcSettings(num_envs=NUM_LANES)
            env = RemoteVectorEnv(f"dm_env_rpc://{server.address}", dm_env_rpc=settings)
        else:
            env = RemoteVectorEnv(server.address, transport=path)
        vector: Any = DictInfoToList(env)
        vector.reset(seed=42)
        infos = [vector.step(np.zeros(NUM_LANES, np.int64))[4] for _ in range(3)]
        vector.close()

    warned = [[info.get("rlmesh.conformance.warning") for info in own] for own in infos]
    text = "observation: 5.0 is above 1.0 (lane 1, element (0,))"
    assert warned == [[None] * 3, [None, [text], None], [None] * 3]


def test_a_vector_has_its_autoreset_mode_where_gymnasiums_have_it() -> None:
    theirs = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED
    )
    with EnvServer("CartPole-v1", num_envs=2, autoreset="disabled") as server:
        env = RemoteVectorEnv(server.address)
        env.close()

    assert env.autoreset_mode is theirs.autoreset_mode
    assert env.metadata["autoreset_mode"] is env.autoreset_mode


@pytest.mark.parametrize("scheme", ["", "dm_env_rpc://"])
def test_one_lane_resets_itself_as_gymnasiums_vectors_of_one(pole: EnvServer, scheme: str) -> None:
    theirs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    theirs.action_space.seed(0)
    ours = RemoteVectorEnv(scheme + pole.address)
    assert ours.autoreset_mode is theirs.autoreset_mode
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
    assert_identical(ours.reset(seed=5)[0], theirs.reset(seed=5)[0])

    num_ends = 0
    for _ in range(2 * NUM_STEPS):
        actions = theirs.action_space.sample()
        local: Any = theirs.step(actions)
        assert_identical(ours.step(actions)[:4], local[:4])
        num_ends += int(local[2][0])
    ours.close()
    theirs.close()

    assert num_ends > 1


def test_one_lane_that_was_reset_after_its_end_is_not_reset_once_more(pole: EnvServer) -> None:
    env = RemoteVectorEnv(pole.address)
    env.reset(seed=5)
    while not env.step(np.ones(1, np.int64))[2][0]:
        pass

    env.reset(seed=6)
    reward = env.step(np.ones(1, np.int64))[1]
    env.close()

    assert reward.tolist() == [1.0]


def same(remote: Any, local: Any, name: str) -> None:
    assert getattr(remote, name) == getattr(local, name), name


def same_but_for_the_mode(remote: Any, local: Any, name: str) -> None:
    # SyncVectorEnv writes the mode into the metadata of its environments' class.
    own, theirs = ({**getattr(env, name), "autoreset_mode": None} for env in (remote, local))
    assert own == theirs


def own(remote: Any, _local: Any, name: str) -> None:
    assert name in vars(type(remote)), name


def inherited(remote: Any, _local: Any, name: str) -> None:
    assert name not in vars(type(remote)), name


def itself(remote: Any, _local: Any, name: str) -> None:
    assert getattr(remote, name) is remote


def same_spec(remote: Any, _local: Any, name: str) -> None:
    local = gymnasium.spec("CartPole-v1")  # a SyncVectorEnv has none
    for field in ("id", "max_episode_steps", "reward_threshold", "nondeterministic"):
        same(getattr(remote, name), local, field)


def refused(remote: Any, _local: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=r"runs at its endpoint: reset\(seed="):
        getattr(remote, name)


ATTRIBUTES = {
    "action_space": same,
    "close": own,
    "metadata": same_but_for_the_mode,
    "np_random": refused,
    "np_random_seed": same,
    "observation_space": same,
    "render": own,
    "render_mode": same,
    "reset": own,
    "spec": same_spec,
    "step": own,
    "unwrapped": itself,
}
ENV_ATTRIBUTES = {
    **ATTRIBUTES,
    "get_wrapper_attr": own,
    "has_wrapper_attr": own,
    "set_wrapper_attr": own,
}
VECTOR_ATTRIBUTES = {
    **ATTRIBUTES,
    "close": inherited,  # it calls the next
    "close_extras": own,
    "closed": same,
    "num_envs": same,
    "single_action_space": same,
    "single_observation_space": same,
}


@pytest.mark.parametrize(
    ("kind", "base", "attributes"),
    [
        (RemoteEnv, gymnasium.Env, ENV_ATTRIBUTES),
        (RemoteVectorEnv, VectorEnv, VECTOR_ATTRIBUTES),
    ],
)
def test_every_attribute_of_gymnasium_is_right_or_says_why_not(
    pole: EnvServer, server: EnvServer, kind: Any, base: Any, attributes: dict[str, Any]
) -> None:
    names = {*dir(base), *base.__annotations__}
    assert {name for name in names if not name.startswith("_")} == set(attributes)
    is_vector = kind is RemoteVectorEnv
    local: Any = cartpoles() if is_vector else gymnasium.make("CartPole-v1")
    remote = kind((server if is_vector else pole).address)
    for env in (remote, local):
        env.reset(seed=42)

    for name, check in attributes.items():
        check(remote, local, name)

    for env in (remote, local):
        env.close()
    assert getattr(remote, "closed", None) == getattr(local, "closed", None)


def test_a_generator_that_is_set_here_would_not_be_the_environments(pole: EnvServer) -> None:
    with RemoteEnv(pole.address) as env:
        for one in (env, gymnasium.wrappers.TransformReward(env, float)):
            with pytest.raises(AttributeError, match="runs at its endpoint"):
                one.np_random = np.random.default_rng(1)


def test_the_seeds_of_lanes_are_those_that_they_were_reset_with(remote: RemoteVectorEnv) -> None:
    local: Any = cartpoles()
    assert remote.np_random_seed == (-1,) * NUM_LANES, "the environments drew their own"

    for seed, mask in (
        (42, None),
        (None, None),
        ([None, 8, None], None),
        (3, [True, False, False]),
        ([None, None, 5], [True, False, True]),
    ):
        for env in (remote, local):
            options = {} if mask is None else {"reset_mask": np.array(mask)}
            env.reset(seed=seed, options=options)
        assert remote.np_random_seed == local.np_random_seed


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv])
def test_after_an_error_no_seed_is_known(kind: Any) -> None:
    action: Any = 1 if kind is RemoteEnv else np.ones(1, np.int64)
    with EnvServer(Named) as server, contextlib.closing(kind(server.address)) as env:
        env.reset(seed=7)
        assert np.ravel(env.np_random_seed).tolist() == [7]

        with pytest.raises(RemoteEnvError, match="asked to fail"):
            env.step(action)

        assert np.ravel(env.np_random_seed).tolist() == [-1]
        env.reset()
        assert np.ravel(env.np_random_seed).tolist() == [-1]


def test_attributes_of_the_environment_are_looked_up_there_or_refused(pole: EnvServer) -> None:
    with RemoteEnv(pole.address) as env:
        assert env.has_wrapper_attr("render_mode")
        assert env.get_wrapper_attr("render_mode") is None
        for ask in (
            lambda: env.has_wrapper_attr("gravity"),
            lambda: env.set_wrapper_attr("gravity", 1.0),
            lambda: env.set_wrapper_attr("gravity", 1.0, force=False),
        ):
            with pytest.raises(ConfigurationError, match="have its operator allow it"):
                ask()
        with pytest.raises(AttributeError, match=r"call\('gravity'\) reads or calls it there"):
            env.get_wrapper_attr("gravity")
        with pytest.raises(AttributeError, match="that runs at its endpoint"):
            env.get_wrapper_attr("np_random")
        with pytest.raises(AttributeError, match="that runs at its endpoint"):
            env.set_wrapper_attr("np_random", None)

    allowed = ("has_wrapper_attr", "set_wrapper_attr", "gravity")
    with EnvServer("CartPole-v1", allow_calls=allowed) as server, RemoteEnv(server.address) as env:
        assert env.has_wrapper_attr("gravity")
        assert not env.has_wrapper_attr("levity")
        assert not env.set_wrapper_attr("levity", 1.0, force=False)
        assert env.set_wrapper_attr("gravity", 1.5, force=False)
        assert env.call("gravity") == 1.5
        assert not hasattr(env, "gravity")


class Painted(gymnasium.Env[Any, Any]):
    """Draws its seed."""

    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._seed = seed
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), self._seed, np.uint8)


@pytest.mark.parametrize(("num_lanes", "is_masked"), [(1, False), (3, True)])
def test_a_vector_renders_one_picture_a_lane(num_lanes: int, is_masked: bool) -> None:
    options = {"reset_mask": np.ones(num_lanes, np.bool_)} if is_masked else None
    with EnvServer(Painted, num_envs=num_lanes) as server:
        env = RemoteVectorEnv(server.address)
        env.reset(seed=7, options=options)
        pictures = env.render()
        env.close()

    assert pictures is not None
    expected = [np.full((4, 6, 3), 7 + lane, np.uint8) for lane in range(num_lanes)]
    assert_identical(list(pictures), expected)


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv])
def test_a_picture_that_is_not_there_yet_says_so(kind: Any) -> None:
    with EnvServer(Painted) as server, contextlib.closing(kind(server.address)) as env:
        with pytest.raises(LocalProtocolError, match=r"has no picture: reset\(\) before render"):
            env.render()

        env.reset(seed=7)
        assert np.ravel(env.render()).tolist() == [7] * 72


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv])
def test_what_other_render_modes_return_is_refused(kind: Any) -> None:
    with (
        EnvServer("FrozenLake-v1", env_kwargs={"render_mode": "ansi"}) as server,
        contextlib.closing(kind(server.address)) as env,
    ):
        env.reset()
        with pytest.raises(ConfigurationError, match="render mode 'ansi', and only pictures"):
            env.render()


class Fragile(Painted):
    """Raises in its steps."""

    def step(self, action: Any) -> Any:
        raise ValueError("asked to fail")


def test_after_an_error_each_lane_has_its_own_picture_still() -> None:
    with (
        EnvServer(Fragile, num_envs=2) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as env,
    ):
        env.reset(seed=7)
        with pytest.raises(RemoteEnvError, match="asked to fail"):
            env.step(np.zeros(2, np.int64))

        assert [picture.shape for picture in env.render() or ()] == [(4, 6, 3)] * 2


def test_a_pending_step_is_waited_for_before_anything_else(remote: RemoteVectorEnv) -> None:
    remote.reset(seed=0)
    actions = np.ones(NUM_LANES, np.int64)
    remote.step_async(actions)

    for impatient in (lambda: remote.step_async(actions), remote.reset):
        with pytest.raises(LocalProtocolError, match="step_wait"):
            impatient()

    local = cartpoles()
    local.reset(seed=0)
    assert_identical(remote.step_wait()[0], local.step(actions)[0])
    assert_identical(remote.step(actions)[0], local.step(actions)[0])


def test_a_closed_session_says_so_although_a_step_is_pending(remote: RemoteVectorEnv) -> None:
    remote.reset()
    remote.step_async(np.ones(NUM_LANES, np.int64))
    remote.close()

    with pytest.raises(EndpointClosedError):
        remote.reset()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": [1, None]}, "seed has 2 entries; give one per lane"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"seed": [1, -2, None]}, "seed=-2 must be 0 or more"),
        ({"seed": [1, 1.7, 2]}, "seed=1.7 must be a whole number"),
        ({"options": 5}, "options=5 must be a mapping"),
        ({"options": ["gravity"]}, "options=.* must be a mapping"),
    ],
)
def test_what_no_reset_takes_is_named(
    remote: RemoteVectorEnv, arguments: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        remote.reset(**arguments)


def test_a_lane_without_a_seed_keeps_its_random_numbers(remote: RemoteVectorEnv) -> None:
    local = cartpoles()
    assert_identical(remote.reset(seed=[1, 2, 3]), local.reset(seed=[1, 2, 3]))

    later: list[list[int | None]] = [[7, None, None], [None, 8, 9], [None, None, None]]
    for seeds in later:
        assert_identical(remote.reset(seed=seeds), local.reset(seed=seeds))


def test_a_reset_mask_and_lanes_without_a_seed_go_together(remote: RemoteVectorEnv) -> None:
    local = cartpoles()
    remote.reset(seed=1)
    local.reset(seed=1)

    ours, theirs = (
        env.reset(seed=[None, 5, 6], options={"reset_mask": np.array([True, False, True])})
        for env in (remote, local)
    )

    assert_identical(ours, theirs)


def test_the_first_reset_draws_for_lanes_without_a_seed(remote: RemoteVectorEnv) -> None:
    first, _ = remote.reset(seed=[1, None, None])

    expected: Any = cartpoles().reset(seed=1)[0]
    np.testing.assert_array_equal(first[0], expected[0])
    assert not np.array_equal(first[1], first[2])
    again, _ = remote.reset(seed=[1, None, None])
    np.testing.assert_array_equal(again[0], first[0])
    assert not np.array_equal(again[1], first[1])


class Unmasked(VectorEnv[Any, Any, Any]):
    """Draws its observations, in each lane from the lane's seed; knows nothing of reset_mask."""

    def __init__(self) -> None:
        self.num_envs = 2
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)
        self.generators = [np.random.default_rng(lane) for lane in range(2)]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for lane, own in enumerate(seed or ()):
            if own is not None:
                self.generators[lane] = np.random.default_rng(own)
        return np.array([[one.random()] for one in self.generators]), {}


def test_a_vector_that_ignores_masks_gets_drawn_seeds_where_some_are_missing() -> None:
    expected = np.random.default_rng(1).random()
    with (
        EnvServer(Unmasked) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as env,
    ):
        observations = [env.reset(seed=[1, None])[0] for _ in range(4)]
        resets = server.statistics().resets
        env.reset(seed=[1, None])

        assert server.statistics().resets == resets + 1  # it is known by now
    assert [one[0, 0] for one in observations] == [expected] * 4
    assert len({one[1, 0] for one in observations}) == 4


def test_what_no_option_is_called_leaves_nothing_to_close() -> None:
    with pytest.raises(TypeError, match="timeout"):
        RemoteVectorEnv("127.0.0.1:1", timeout=3)  # type: ignore[call-arg]
    RemoteVectorEnv.__new__(RemoteVectorEnv).close()  # as the collector does after that


def test_whether_memory_is_shared_is_no_word() -> None:
    with pytest.raises(ConfigurationError, match="transport='foo' is not one of auto"):
        RemoteVectorEnv("127.0.0.1:1", transport="foo")
    with pytest.raises(ConfigurationError, match="transport='foo' is not one of auto"):
        EnvServer("CartPole-v1", transport="foo")


def test_a_single_environment_takes_no_seed_below_0(pole: EnvServer) -> None:
    before = pole.statistics().resets
    with RemoteEnv(pole.address) as env:
        with pytest.raises(ConfigurationError, match="seed=-1 must be 0 or more"):
            env.reset(seed=-1)
        assert pole.statistics().resets == before


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("CartPole-v1", "an environment is served first: rlmesh-ray serve-env CartPole-v1"),
        ("some/net.pt", "a policy is served first: rlmesh-ray serve-model some/net.pt"),
        ("runs/x/checkpoint", "a policy is served first: rlmesh-ray serve-model runs/x/checkpoint"),
        (str(Path(__file__).parent), "a policy is served first: rlmesh-ray serve-model /"),
    ],
)
def test_what_is_no_address_yet_is_named_with_what_makes_it_one(name: str, remedy: str) -> None:
    with pytest.raises(AddressError, match=remedy):
        evaluate(name, "127.0.0.1:1", episodes=1)


class Named(gymnasium.Env[Any, Any]):
    """Its infos say with which seed it has been reset; fails on request."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {"seed": -1 if seed is None else seed, "options": dict(options or {})}

    def step(self, action: Any) -> Any:
        if action:
            raise ValueError("asked to fail")
        return 0, 0.0, False, False, {}


@pytest.fixture(scope="module")
def named() -> Iterator[EnvServer]:
    with EnvServer(Named, num_envs=2) as server:
        yield server


def test_the_infos_of_lanes_with_a_seed_and_of_those_without_come_together(
    named: EnvServer,
) -> None:
    env = RemoteVectorEnv(named.address)
    env.reset()

    _, infos = env.reset(seed=[None, 4], options={"level": 3})

    assert infos["seed"].tolist() == [-1, 4]
    assert infos["_seed"].tolist() == [True, True]
    assert infos["options"]["level"].tolist() == [3, 3]
    env.close()


def test_after_an_error_lanes_without_a_seed_are_reset_as_well(named: EnvServer) -> None:
    env = RemoteVectorEnv(named.address)
    env.reset()
    with pytest.raises(RemoteEnvError, match="asked to fail"):
        env.step(np.array([0, 1]))

    _, infos = env.reset(seed=[None, 4])

    assert infos["seed"][1] == 4
    assert infos["seed"][0] >= 0, "drawn: the request carries a seed a lane"
    env.close()


class Judge(gymnasium.Env[Any, Any]):
    """Takes every action that reaches it."""

    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 1.0, False, False, {}


BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,))
# One number, and one inside of a structure; each kind of space is tested with its validation.
MISTAKES: list[tuple[gymnasium.Space[Any], Any, Any, str]] = [
    (gymnasium.spaces.Discrete(3), 1, 3, "action: 3 is above 2"),
    (
        gymnasium.spaces.Dict({"arm": BOX, "say": gymnasium.spaces.Text(3)}),
        {"arm": np.zeros(2, np.float32), "say": "far too long"},
        {"arm": np.full(2, np.nan, np.float32), "say": "no"},
        r"action\.arm: is NaN",
    ),
]


@pytest.mark.parametrize(("space", "good", "bad", "message"), MISTAKES)
def test_an_action_that_the_endpoint_would_refuse_costs_no_session(
    space: gymnasium.Space[Any], good: Any, bad: Any, message: str
) -> None:
    with EnvServer(lambda: Judge(space)) as server:
        env = RemoteEnv(server.address)
        env.reset()

        with pytest.raises(ConformanceError, match=rf"^{message} \(lane 0"):
            env.step(bad)

        # Bounds of a Box and lengths of a Text are the endpoint's affair, which delivers both.
        assert env.step(good)[1] == 1.0
        env.close()


def test_an_action_outside_its_domain_is_named_with_its_lane(remote: RemoteVectorEnv) -> None:
    remote.reset(seed=0)

    with pytest.raises(ConformanceError, match=r"^action: 2 is above 1 \(lane 1\)"):
        remote.step(np.array([0, 2, 0]))

    local = cartpoles()
    local.reset(seed=0)
    actions = np.array([0, 1, 0])
    assert_identical(remote.step(actions), local.step(actions))


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv, RemoteModel])
@pytest.mark.parametrize("address", [None, b"127.0.0.1:1"])
def test_addresses_that_cannot_be_dialed_are_named(kind: Any, address: Any) -> None:
    with pytest.raises(RlmeshError, match="is not an address"):
        kind(address)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": -1}, "connect_timeout_s=-1 must be"),
        ({"timeout_s": "1"}, "connect_timeout_s='1' must be"),
        ({"edition_text": 5}, "edition_text=5 must be text"),
    ],
)
def test_a_connection_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RlmeshError, match=message):
        RemoteEnv(ConnectOptions("127.0.0.1:1", **options))


@pytest.mark.parametrize("wait_s", [-1, "1"])
def test_a_wait_that_cannot_be_is_refused(wait_s: Any) -> None:
    with pytest.raises(RlmeshError, match=f"connect_timeout_s={wait_s!r} must be"):
        RemoteModel("127.0.0.1:1", connect_timeout_s=wait_s)


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv])
@pytest.mark.parametrize("gone", ["connect_timeout_s", "edition_text"])
def test_what_a_connection_has_is_no_option_of_a_client(kind: Any, gone: str) -> None:
    with pytest.raises(TypeError, match=rf"takes no '{gone}' any more: .* a ConnectOptions"):
        kind("127.0.0.1:1", **{gone: 1})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (RemoteEnv, "step_timeout_s"),
        (RemoteVectorEnv, "step_timeout_s"),
        (RemoteModel, "predict_timeout_s"),
    ],
)
@pytest.mark.parametrize("timeout_s", [0, float("nan"), "a", None])
def test_a_time_to_wait_that_is_none_is_named(kind: Any, name: str, timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}="):
        kind("127.0.0.1:1", **{name: timeout_s})


def test_returned_arrays_belong_to_the_caller(remote: RemoteVectorEnv) -> None:
    first, _ = remote.reset(seed=0)
    kept = first.copy()

    second, *_ = remote.step(np.zeros(NUM_LANES, np.int64))
    second[:] = 0.0

    np.testing.assert_array_equal(first, kept)


class Duel:
    """What RLlib's MultiAgentEnv has."""

    possible_agents: ClassVar[Any] = ["scout", "carrier"]
    observation_spaces: ClassVar[Any] = {name: Discrete(2) for name in ("scout", "carrier")}
    action_spaces: ClassVar[Any] = {name: Discrete(2) for name in ("scout", "carrier")}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"scout": 0, "carrier": 1}, {}

    def step(self, actions: Any) -> Any:
        none_ended = dict.fromkeys(self.possible_agents, False)
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        return {"scout": 0, "carrier": 1}, rewards, {"__all__": False, **none_ended}, none_ended, {}

    def close(self) -> None:
        """Hold nothing."""


@pytest.fixture(scope="module")
def duel() -> Iterator[EnvServer]:
    with EnvServer(Duel) as server:
        yield server


def test_an_action_of_one_agent_for_a_lane_of_several_is_refused_with_their_names(
    duel: EnvServer,
) -> None:
    env, vector = RemoteEnv(duel.address), RemoteVectorEnv(duel.address)
    for remote, action in ((env, {"a": 1}), (vector, np.zeros(1, np.int64))):
        remote.reset()
        with pytest.raises(ConformanceError, match=r"'scout', 'carrier'.*multi-agent runner"):
            remote.step(action)
        remote.step({"scout": action_of(remote), "carrier": action_of(remote)})
        remote.close()


def action_of(env: RemoteEnv | RemoteVectorEnv) -> Any:
    return np.ones(1, np.int64) if isinstance(env, RemoteVectorEnv) else 1


def test_lanes_of_several_agents_are_not_evaluated_and_the_agents_are_named(
    duel: EnvServer,
) -> None:
    why = r"evaluated here: .*'scout', 'carrier'.*config"
    with pytest.raises(ContractMismatchError, match=why):
        evaluate(duel.address, lambda observations: observations, episodes=1)
