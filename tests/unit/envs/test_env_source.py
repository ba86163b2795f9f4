import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rlmesh_ray.envs.env_source import EnvLike, EnvSource, build, make_source
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.testing.envs import SPACES, EchoEnv

BOX = SPACES["box"]


def sync_vector() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: EchoEnv(SPACES["box"])] * 3)


def built(source: EnvSource) -> VectorEnv[Any, Any, Any]:
    return build(source)


def test_an_id_becomes_lanes() -> None:
    source = make_source("CartPole-v1", 2)

    vector = built(source)

    assert isinstance(vector, LaneVectorEnv)
    assert vector.num_envs == 2
    assert vector.spec is not None
    assert vector.spec.id == "CartPole-v1"
    assert (source.max_sessions, source.can_recreate) == (None, True)
    assert source.description == "CartPole-v1"


def test_an_id_may_name_the_module_that_registers_it() -> None:
    assert built(make_source("gymnasium.envs:CartPole-v1")).num_envs == 1


def test_a_factory_may_be_named_with_its_module() -> None:
    source = make_source("rlmesh_ray.testing.envs:EchoEnv", 2, {"observation_space": BOX})

    assert built(source).single_observation_space == BOX
    assert source.description == "rlmesh_ray.testing.envs:EchoEnv"


@pytest.mark.parametrize("name", ["SPACES", "NoSuchEnv"])
def test_a_name_that_leads_to_no_factory_is_refused_with_both_readings(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no function or class {name}, and registers no"):
        built(make_source(f"rlmesh_ray.testing.envs:{name}"))


def test_keyword_arguments_reach_gymnasium_make() -> None:
    vector = built(make_source("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}))

    assert vector.render_mode == "rgb_array"


def with_gravity(gravity: float = 9.8, *, length: float = 1.0) -> EchoEnv:
    return EchoEnv(SPACES["box"])


def with_any(**kwargs: Any) -> EchoEnv:
    return with_gravity(**kwargs)


def with_help(gravity: float = 9.8) -> EchoEnv:
    return with_any(mass=gravity)


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        (with_gravity, "gravty", "the environment takes gravity, length; did you mean gravity?"),
        (with_gravity, "mass", "the environment takes gravity, length"),
        (lambda: EchoEnv(BOX), "mass", "the environment takes none"),
        ("CartPole-v1", "mass", "the environment takes sutton_barto_reward, render_mode"),
        (f"{__name__}:with_gravity", "mass", "the environment takes gravity, length"),
    ],
)
def test_an_unknown_keyword_is_refused_with_those_that_there_are(
    env: EnvLike, name: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        built(make_source(env, env_kwargs={name: 1}))

    assert str(caught.value) == f"env_kwargs has {name!r}, and {words}"


@pytest.mark.parametrize(("env", "name"), [(with_any, "mass"), (with_help, "gravity")])
def test_an_error_about_another_call_s_keyword_is_left_alone(env: EnvLike, name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mass'"):
        built(make_source(env, env_kwargs={name: 1}))


def test_a_module_that_another_one_misses_is_no_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_need.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        built(make_source("in_need:make"))
    with pytest.raises(ConfigurationError, match="No module named 'in_nead'"):
        built(make_source("in_nead:make"))


def test_a_factory_is_called_once_a_lane() -> None:
    source = make_source(lambda: EchoEnv(SPACES["box"]), 3)

    vector = built(source)

    assert isinstance(vector, LaneVectorEnv)
    assert len(set(map(id, vector.envs))) == 3
    assert source.can_recreate
    assert "lambda" in source.description


def test_keyword_arguments_reach_a_factory() -> None:
    source = make_source(
        EchoEnv, env_kwargs={"observation_space": SPACES["box"], "render_mode": "rgb_array"}
    )

    assert built(source).render_mode == "rgb_array"


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_factory_may_return_a_vector(num_envs: int) -> None:
    vector = built(make_source(sync_vector, num_envs))

    assert isinstance(vector, SyncVectorEnv)
    assert vector.num_envs == 3


def test_a_vector_of_another_width_is_refused() -> None:
    source = make_source(sync_vector, 2)

    with pytest.raises(ConfigurationError, match="has 3 lanes, num_envs is 2"):
        built(source)


class Pool(EchoEnv):
    """Has, as EnvPool's environments do, a spec that is not gymnasium's and has no id."""

    spec = object()  # type: ignore[assignment]

    def __str__(self) -> str:
        return "a pool"


def test_an_instance_whose_spec_has_no_id_is_described_by_itself() -> None:
    assert make_source(Pool(BOX)).description == "a pool"


def test_a_vector_that_returns_some_lanes_at_a_time_is_refused() -> None:
    def pool() -> VectorEnv[Any, Any, Any]:
        vector = sync_vector()
        vector.is_async = True  # type: ignore[attr-defined]
        return vector

    with pytest.raises(ConfigurationError, match="leave batch_size out"):
        built(make_source(pool))


def test_an_envpool_from_before_it_had_gymnasiums_vectors_is_refused() -> None:
    def pool() -> EchoEnv:
        env = EchoEnv(BOX)
        env.all_env_ids = [0, 1, 2]  # type: ignore[attr-defined]
        return env

    with pytest.raises(ConfigurationError, match="upgrade EnvPool"):
        built(make_source(pool))


def test_a_factory_of_something_else_is_refused() -> None:
    source = make_source(lambda: 5)  # type: ignore[arg-type,return-value]

    with pytest.raises(ConfigurationError, match="the factory returned 5"):
        built(source)


def test_an_instance_serves_one_session() -> None:
    source = make_source(EchoEnv(SPACES["box"]))

    vector = built(source)

    assert isinstance(vector, LaneVectorEnv)
    assert isinstance(vector.envs[0], EchoEnv)
    assert (source.max_sessions, source.can_recreate) == (1, False)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_vector_instance_keeps_its_width(num_envs: int) -> None:
    source = make_source(LaneVectorEnv([EchoEnv(SPACES["box"]) for _ in range(3)]), num_envs)

    assert source.num_envs == 3
    assert source.max_sessions == 1
    assert built(source).num_envs == 3


def test_the_description_of_an_instance_is_its_id() -> None:
    assert make_source(gymnasium.make("CartPole-v1")).description == "CartPole-v1"


@pytest.mark.parametrize("width", [1, 3])
def test_an_instance_of_another_width_is_refused(width: int) -> None:
    env = EchoEnv(SPACES["box"]) if width == 1 else sync_vector()

    with pytest.raises(ConfigurationError, match=f"has {width} lane.*num_envs is 2"):
        make_source(env, 2)


def test_an_instance_takes_no_keyword_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"env_kwargs \['gravity'\] come too late"):
        make_source(EchoEnv(SPACES["box"]), env_kwargs={"gravity": 1})


def test_an_instance_that_cannot_be_pickled_is_refused() -> None:
    env = EchoEnv(SPACES["box"])
    env.lock = threading.Lock()  # type: ignore[attr-defined]

    with pytest.raises(ConfigurationError, match="give a factory that creates it there"):
        make_source(env)


@pytest.mark.parametrize("num_envs", [0, -1])
def test_at_least_one_lane_is_needed(num_envs: int) -> None:
    with pytest.raises(ConfigurationError, match="at least one lane"):
        make_source("CartPole-v1", num_envs)


@pytest.mark.parametrize("num_envs", ["4", 2.5, None])
def test_the_number_of_lanes_is_a_whole_number(num_envs: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^num_envs=.* must be a whole number$"):
        make_source("CartPole-v1", num_envs)


@pytest.mark.parametrize("env_kwargs", [[1], "gravity", {1: 1}, 0])
def test_keyword_arguments_are_a_mapping_with_names(env_kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^env_kwargs=.* must be a mapping from names"):
        make_source("CartPole-v1", env_kwargs=env_kwargs)


@pytest.mark.parametrize(
    "name", ["", ":", ":make", "mymod:", "mymod:make:x", "./mymod:make", "mymod.py:make", "a-b:c"]
)
def test_what_cannot_name_an_environment_is_refused_with_the_forms_that_can(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make_source(name)

    assert str(refused.value).startswith(
        f"{name!r} names no environment; write module:factory, without folder and without .py, or "
    )


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "sim.example.com"])
def test_a_host_without_a_port_is_refused_as_such(name: str) -> None:
    with pytest.raises(AddressError, match=r"is an address without a port, .* write HOST:PORT"):
        make_source(name)


@pytest.mark.parametrize("env_id", ["sim.example", "sim.example-v3"])
def test_a_registered_id_may_look_like_a_host(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvSpec(env_id, entry_point="examples:make")
    monkeypatch.setitem(gymnasium.registry, env_id, spec)

    assert make_source("sim.example").description == "sim.example"


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "ALE/Pong-v5", "my.mod:Env-v0", "ale_py:ALE/Pong-v5", "my.mod:A.make"]
)
def test_ids_and_factories_are_looked_for_where_they_will_run(name: str) -> None:
    assert make_source(name).description == name


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot host 5; give a Gymnasium id"):
        make_source(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("autoresets", [True, False])
def test_lanes_have_autoreset_as_the_option_says(autoresets: bool) -> None:
    source = make_source("CartPole-v1", 2, autoresets=autoresets)

    expected = AutoresetMode.NEXT_STEP if autoresets else AutoresetMode.DISABLED
    assert built(source).metadata["autoreset_mode"] is expected


def test_autoreset_of_a_vector_cannot_be_disabled() -> None:
    source = make_source(sync_vector, autoresets=False)

    with pytest.raises(ConfigurationError, match="resets its lanes itself"):
        built(source)
    with pytest.raises(ConfigurationError, match="resets its lanes itself"):
        make_source(LaneVectorEnv([EchoEnv(SPACES["box"]) for _ in range(2)]), autoresets=False)


def test_a_vector_without_autoreset_goes_with_autoreset_disabled() -> None:
    def disabled() -> SyncVectorEnv:
        make = partial(EchoEnv, SPACES["box"])
        return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.DISABLED)

    assert isinstance(built(make_source(disabled, autoresets=False)), SyncVectorEnv)
    instance = LaneVectorEnv([EchoEnv(SPACES["box"])])
    assert make_source(instance, autoresets=False).num_envs == 1


def test_a_vector_that_resets_its_lanes_itself_takes_no_threads_for_that() -> None:
    source = make_source(lambda: gymnasium.make_vec("CartPole-v1", 2))

    with pytest.raises(ConfigurationError, match="reset_threads is for single environments"):
        build(replace(source, reset_threads=2))
