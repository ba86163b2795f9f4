"""Our client against a dm_env_rpc server that is not ours (``dm_env_rpc_peer``)."""

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlmesh_ray import RemoteEnv, RemoteVectorEnv, evaluate
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_session_client import probe_endpoint
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigurationError,
    ConfigurationWarning,
    ContractMismatchError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteEnvError,
    RemoteProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import DiscreteSpec
from rlmesh_ray.spaces.validation import WARNING_KEY
from rlmesh_ray.spaces.vector_infos import lane_info
from tests.loopback.dm_env_rpc_peer import (
    CORRIDOR,
    CUT,
    INTERRUPTED,
    LATE,
    SILENT,
    TERMINATED,
    Conduct,
    Peer,
    spec,
    specs,
)
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

PERMISSION_DENIED, EXHAUSTED, FAILED_PRECONDITION, INVALID = 7, 8, 9, 3


def vector(peer: Peer, num_envs: int = 2, *, wait_s: float = 10.0, **more: Any) -> RemoteVectorEnv:
    settings = DmEnvRpcSettings(num_envs=num_envs, **more)
    return RemoteVectorEnv(
        ConnectOptions(peer.address, timeout_s=wait_s),
        step_timeout_s=wait_s,
        reset_timeout_s=wait_s,
        dm_env_rpc=settings,
    )


def discrete(n: int, start: int, dtype: str) -> Any:
    """Return the space, in the form that the installed gymnasium has for it."""
    return to_gymnasium(DiscreteSpec(n, start, dtype))


def moves(*each: int) -> dict[str, Any]:
    return {"move": np.array(each, np.int8)}


def with_discount() -> Any:
    described = pb.ActionObservationSpecs()
    described.CopyFrom(CORRIDOR)
    described.observations[8].CopyFrom(spec("discount", np.float32))
    return described


def test_lanes_step_as_a_vector_environment_of_gymnasium() -> None:
    with Peer() as peer:
        env = vector(peer)
        assert env.single_action_space == spaces.Dict({"move": discrete(3, -1, "int8")})
        assert env.single_observation_space["place"]["at"] == spaces.Box(-9, 9, (2,), np.float32)  # type: ignore[index]
        assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        first, infos = env.reset()
        results = [env.step(moves(1, -1)) for _ in range(5)]
        env.close()

    assert infos == {}
    assert first["place"]["at"].tolist() == [[0, 0], [0, 0]]
    at = [result[0]["place"]["at"][:, 0].tolist() for result in results]
    assert at == [[1, -1], [2, -2], [3, -3], [0, 0], [1, -1]]
    assert [result[1].tolist() for result in results] == [
        [101, 99], [102, 98], [103, 97], [0, 0], [101, 99],
    ]  # fmt: skip
    assert [result[2].tolist() for result in results] == [[step == 2] * 2 for step in range(5)]
    assert not any(result[3].any() for result in results)


def test_each_lane_has_a_world_of_its_own_and_leaves_nothing_behind() -> None:
    with Peer() as peer:
        env = vector(peer)
        env.reset()
        env.close()

        for stream in (2, 3):  # the first one asked for the contract
            assert peer.kinds(stream) == [
                "create_world",
                "join_world",
                "step",
                "leave_world",
                "destroy_world",
            ]
        joined = {message.world_name for _, kind, message in peer.requests if kind == "join_world"}
    assert joined == {"world-1", "world-2"}


def test_agents_of_one_world_share_what_the_first_one_creates() -> None:
    with Peer() as peer:
        vector(peer, one_world=True, join=[{"who": 0}, {"who": 1}]).close()

        assert peer.kinds().count("create_world") == peer.kinds().count("destroy_world") == 1
        assert {int(join["who"]) for join in peer.settings("join_world")} == {0, 1}
        assert {m.world_name for _, kind, m in peer.requests if kind == "join_world"} == {"world-1"}


def test_a_world_that_is_there_is_joined_and_not_destroyed() -> None:
    with Peer() as peer:
        vector(peer, 1, create=None, world_name="cave").close()

        assert peer.kinds() == ["join_world", "leave_world"]
        assert [m.world_name for _, kind, m in peer.requests if kind == "join_world"] == ["cave"]


def test_actions_and_observations_are_what_a_step_carries_and_no_more() -> None:
    with Peer() as peer:
        env = vector(peer, 1)
        env.reset()
        env.step(moves(1))
        env.close()

        begin, step = [message for _, kind, message in peer.requests if kind == "step"]
    assert not begin.actions
    assert list(step.actions) == [3]
    # The picture stays where it is.
    assert sorted(step.requested_observations) == [1, 2, 7]


def test_settings_go_where_they_belong() -> None:
    with Peer() as peer:
        env = vector(
            peer, create={"level": "cave"}, join={"size": 3}, reset={"night": True}, seed="seed"
        )
        observation, _ = env.reset(seed=[4, 9], options={"wind": 0.5})
        env.close()

        assert peer.settings("create_world") == [{"level": "cave"}] * 2
        assert peer.settings("join_world") == [{"size": 3}] * 2
        assert sorted(peer.settings("reset"), key=lambda reset: int(reset["seed"])) == [
            {"night": True, "wind": 0.5, "seed": seed} for seed in (4, 9)
        ]
    assert observation["place"]["seed"].tolist() == [4, 9]


def test_a_seed_that_no_setting_takes_is_warned_about() -> None:
    with Peer() as peer:
        env = vector(peer)
        with pytest.warns(ConfigurationWarning, match=r"DmEnvRpcSettings\(seed=...\)"):
            env.reset(seed=1)
        env.close()


def test_some_lanes_can_begin_anew_while_others_stay() -> None:
    with Peer(Conduct(length=9)) as peer:
        env = vector(peer, 3)
        env.reset()
        env.step(moves(1, 1, 1))
        observation, _ = env.reset(options={"reset_mask": np.array([False, True, False])})
        after = env.step(moves(1, 1, 1))[0]
        env.close()

    assert observation["place"]["at"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert after["place"]["at"].tolist() == [[2, 2], [1, 1], [2, 2]]


def test_a_reset_in_the_middle_ends_the_sequence_there() -> None:
    with Peer() as peer:
        env = vector(peer, 1)
        env.reset()
        env.step(moves(1))
        observation, _ = env.reset()
        env.close()

        assert peer.kinds()[2:-2] == ["step", "step", "reset", "step"]
    assert observation["place"]["at"].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("conduct", "settings", "is_disconnected"),
    [
        (Conduct(), {}, False),
        (Conduct(end_state=INTERRUPTED), {}, True),
        (Conduct(), {"truncate_on_terminated": True}, True),
        (Conduct(), {"time_limit_steps": 3}, True),
        (Conduct(), {"time_limit_steps": 4}, False),
        (Conduct(specs=with_discount(), discount=0.0), {}, False),
        (Conduct(specs=with_discount(), discount=0.99), {}, True),
    ],
)
def test_ends_are_distinguished_from_cuts(
    conduct: Conduct, settings: dict[str, Any], is_disconnected: bool
) -> None:
    with Peer(conduct) as peer:
        env = RemoteEnv(peer.address, dm_env_rpc=DmEnvRpcSettings(**settings))
        assert "discount" not in env.observation_space.spaces  # type: ignore[attr-defined]
        env.reset()
        flags = [env.step({"move": 0})[2:4] for _ in range(4)]
        env.close()

    assert flags == [(False, False)] * 2 + [(not is_disconnected, is_disconnected), (False, False)]


def test_without_a_reward_there_is_none() -> None:
    with Peer() as peer:
        env = vector(peer, 1, reward="score")
        env.reset()
        observation, rewards, *_ = env.step(moves(1))
        env.close()

    # What is not the reward is something to see.
    assert observation["reward"].tolist() == [101.0]
    assert rewards.tolist() == [0.0]


def test_a_reward_may_have_another_name() -> None:
    with Peer() as peer:
        env = vector(peer, 1, reward="place.seed", observations=("place.at",), seed="seed")
        env.reset(seed=8)
        assert env.step(moves(1))[1].tolist() == [8.0]
        env.close()


def test_a_reward_that_is_no_number_is_refused() -> None:
    with Peer() as peer, pytest.raises(UnsupportedSpaceError, match=r"'place.at' is FLOAT \[2\]"):
        vector(peer, 1, reward="place.at", observations=("place.seed",))
    assert peer.kinds()[-2:] == ["leave_world", "destroy_world"]


def test_actions_that_are_left_out_are_the_servers() -> None:
    described = specs(
        {3: spec("move", np.int8, (), -1, 1), 4: spec("blob", np.float32, (-1,))},
        CORRIDOR.observations,
    )
    with Peer(Conduct(specs=described)) as peer:
        with pytest.raises(UnsupportedSpaceError, match="'blob' cannot be part"):
            vector(peer, 1)
        env = vector(peer, 1, actions=("move",), is_bare=True, observations=("place.at",))
        assert env.single_action_space == discrete(3, -1, "int8")
        env.reset()
        assert env.step(np.array([-1]))[0].tolist() == [[-1.0, 1.0]]
        env.close()


def test_bounds_of_servers_before_1_1_are_found() -> None:
    old = pb.TensorSpec.FromString(
        pb.TensorSpec(name="move", dtype=pb.INT32).SerializeToString()
        # min { int32 = -2 }, max { int32 = 2 }, as version 1.0 wrote them
        + b"\x22\x0b\x18\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"
        + b"\x2a\x02\x18\x02"
    )
    with Peer(Conduct(specs=specs({3: old}, CORRIDOR.observations))) as peer:
        env = vector(peer, 1)
        assert env.single_action_space["move"] == discrete(5, -2, "int32")  # type: ignore[index]
        env.close()


def test_specs_that_change_with_a_reset_end_the_session_with_the_reason() -> None:
    changed = specs(CORRIDOR.actions, {1: spec("place.at", np.float32, (3,))})
    with Peer(Conduct(specs_after_reset=changed)) as peer:
        env = vector(peer)
        env.reset()
        with pytest.raises(ContractMismatchError, match=r"lane 0 .*'place.at' is another one"):
            env.reset()
        with pytest.raises(EndpointLostError, match="ended with an error"):
            env.reset()
        env.close()


def test_lanes_of_different_kinds_are_refused() -> None:
    other = specs({1: spec("jump", np.int8)}, CORRIDOR.observations)
    conduct = Conduct(specs_of_stream={3: other})
    with (
        Peer(conduct) as peer,
        pytest.raises(ContractMismatchError, match=r"lane \d other actions"),
    ):
        vector(peer)


def test_lanes_may_have_uids_of_their_own() -> None:
    other = specs(
        {11: CORRIDOR.actions[3]},
        {12: CORRIDOR.observations[1], 13: CORRIDOR.observations[2], 14: CORRIDOR.observations[7]},
    )
    alike = specs({3: CORRIDOR.actions[3]}, {uid: CORRIDOR.observations[uid] for uid in (1, 2, 7)})
    with Peer(Conduct(specs=alike, specs_of_stream={3: other})) as peer:
        env = vector(peer)
        env.reset()
        assert env.step(moves(1, 1))[0]["place"]["at"].tolist() == [[1, 1], [1, 1]]
        env.close()


@pytest.mark.parametrize(
    ("conduct", "complaint"),
    [
        (Conduct(first_state=TERMINATED), "lane 0 went from TERMINATED to TERMINATED"),
        (Conduct(first_state=INTERRUPTED), "lane 0 went from TERMINATED to INTERRUPTED"),
        (Conduct(first_state=0), "state 0, which dm_env_rpc does not have"),
        (Conduct(alter=lambda step: step.observations.clear()), "'reward' was asked for"),
        (
            Conduct(alter=lambda step: step.observations[1].floats.array.append(0)),
            r"place.at: 3 elements do not make shape \[2\]",
        ),
        (
            Conduct(alter=lambda step: step.observations.pop(1)),
            "'place.at' was asked for",
        ),
        (
            Conduct(alter=lambda step: step.observations[1].CopyFrom(step.observations[2])),
            r"'place.at' came as INT64 \[\]; its spec says FLOAT \[2\]",
        ),
        (
            Conduct(alter=lambda step: step.observations[7].ClearField("doubles")),
            "reward: a tensor without a payload",
        ),
        (
            Conduct(alter=lambda step: step.observations[7].doubles.array.append(0)),
            "'reward' is no single number",
        ),
        (
            Conduct(alter=lambda step: step.observations[7].strings.array.append("a")),
            "'reward' is no single number",
        ),
    ],
)
def test_what_breaks_the_protocol_ends_the_session(conduct: Conduct, complaint: str) -> None:
    with Peer(conduct) as peer:
        env = vector(peer)
        with pytest.raises(RemoteProtocolError, match=complaint):
            env.reset()
        with pytest.raises(EndpointLostError):
            env.step(moves(0, 0))
        env.close()


def altered(name: str, value: float) -> Callable[[Any], None]:
    """Return what puts ``value`` into an observation of each step, as its first element."""
    uid, tensor = {"place.at": (1, "floats"), "reward": (7, "doubles")}[name]

    def alter(step: Any) -> None:
        getattr(step.observations[uid], tensor).array[0] = value

    return alter


@pytest.mark.parametrize(
    ("make", "move"), [(vector, moves(0, 0)), (lambda peer: RemoteEnv(peer.address), {"move": 0})]
)
def test_values_out_of_range_are_delivered_and_warned_about_once(
    make: Callable[[Peer], Any], move: dict[str, Any]
) -> None:
    with Peer(Conduct(length=9, alter=altered("place.at", 10.0))) as peer:
        env = make(peer)
        observation, first = env.reset()
        assert np.ravel(observation["place"]["at"])[0] == 10.0
        peer.conduct.alter = altered("reward", np.inf)
        _, reward, _, _, second = env.step(move)
        assert np.isinf(reward).all()
        *_, third = env.step(move)
        env.close()

    text = "observation.place.at: 10.0 is above 9.0 (lane 0, element (0,))"
    assert lane_info(first, 0)[WARNING_KEY] == [text]
    assert lane_info(second, 0)[WARNING_KEY] == ["reward: inf is not finite (lane 0)"]
    assert WARNING_KEY not in third


@pytest.mark.parametrize(
    ("name", "value", "validation"),
    [
        ("place.at", 10.0, "strict"),
        ("place.at", np.nan, "warn"),
        ("reward", np.nan, "strict"),
        ("reward", -np.inf, "strict"),
    ],
)
def test_a_value_that_is_refused_ends_the_session(name: str, value: float, validation: str) -> None:
    with Peer(Conduct(length=9)) as peer:
        env = vector(peer, validation=validation)
        env.reset()
        env.step(moves(1, 1))
        peer.conduct.alter = altered(name, value)
        with pytest.raises(RemoteEnvError, match=rf"{name}.*\(lane 0") as caught:
            env.step(moves(1, 1))
        assert not caught.value.is_recoverable
        with pytest.raises(EndpointLostError, match="ended with an error"):
            env.reset()
        env.close()

        assert peer.kinds().count("leave_world") == peer.kinds().count("destroy_world") == 2


def test_lanes_that_have_not_begun_show_values_of_the_space() -> None:
    described = specs(CORRIDOR.actions, {1: spec("place.at", np.float32, (2,), -9, -4)})
    with Peer(Conduct(specs=described, alter=altered("place.at", -5.0))) as peer:
        env = vector(peer, validation="strict")
        mask = np.array([False, True])
        with pytest.raises(RemoteEnvError, match=r"place.at: 0.0 is above -4.0 \(lane 1, .*\(1,\)"):
            env.reset(options={"reset_mask": mask})
        env.close()


def test_a_step_that_is_refused_leaves_the_session_usable() -> None:
    with Peer() as peer:
        env = vector(peer)
        env.reset()
        peer.conduct.refusals["step"] = [INVALID]
        with pytest.raises(RemoteEnvError, match=r"lane \d: no step now") as caught:
            env.step(moves(1, 1))
        assert caught.value.is_recoverable
        observation, _ = env.reset()
        result = env.step(moves(1, 1))
        env.close()

    assert observation["place"]["at"].tolist() == [[0, 0], [0, 0]]
    assert result[0]["place"]["at"].tolist() == [[1, 1], [1, 1]]


def test_a_reset_that_is_refused_leaves_the_session_usable() -> None:
    with Peer() as peer:
        env = vector(peer)
        env.reset()
        peer.conduct.refusals["reset"] = [INVALID]
        with pytest.raises(RemoteEnvError, match="no reset now"):
            env.reset()
        assert env.reset()[0]["place"]["at"].tolist() == [[0, 0], [0, 0]]
        env.close()


def test_a_step_without_an_answer_ends_the_session_at_its_deadline() -> None:
    with Peer(Conduct(length=1)) as peer:
        env = RemoteVectorEnv(
            peer.address, step_timeout_s=1.5, dm_env_rpc=DmEnvRpcSettings(num_envs=2)
        )
        env.reset()
        assert env.step(moves(1, 1))[2].all()
        env.reset()  # so that the next step begins no episode
        peer.conduct.refusals["step"] = [SILENT]
        with pytest.raises(
            EndpointTimeoutError, match=r"no answer within 1\.5 s; raise step_timeout_s"
        ):
            env.step(moves(1, 1))
        with pytest.raises(EndpointLostError):
            env.reset()
        env.close()


def test_a_session_may_be_closed_while_a_thread_waits_for_a_step() -> None:
    with Peer() as peer:
        env = vector(peer)
        env.reset()
        peer.conduct.refusals["step"] = [LATE, LATE]
        with ThreadPoolExecutor(1) as pool:
            stepping = pool.submit(env.step, moves(1, 1))
            assert eventually(lambda: peer.kinds().count("step") == 4)
            env.close()
            with contextlib.suppress(EndpointError, RemoteProtocolError):
                stepping.result(10.0)

        assert peer.kinds().count("leave_world") == 2


def test_a_server_that_is_not_ready_is_asked_again() -> None:
    refusals = {
        "create_world": [CUT],
        "join_world": [FAILED_PRECONDITION, CUT],
    }
    with Peer(Conduct(refusals=refusals)) as peer:
        env = vector(peer, 1)
        assert env.reset()[0]["place"]["at"].tolist() == [[0, 0]]
        env.close()

        # A refused join is repeated in the world that is there; a cut stream needs a new one.
        assert peer.kinds()[:6] == ["create_world"] * 2 + ["join_world"] * 2 + [
            "create_world",
            "join_world",
        ]


def test_a_server_that_starts_late_is_waited_for() -> None:
    late = Peer()
    timer = threading.Timer(0.3, late.__enter__)  # its port is bound, and answers nothing yet
    timer.start()
    try:
        env = vector(late, 1)
        env.reset()
        env.close()
    finally:
        timer.join()
        late.__exit__()


@pytest.mark.parametrize("more", [{}, {"batched": True}, {"asks_contract": False}])
def test_an_absent_server_is_reported_when_the_time_is_up(more: dict[str, Any]) -> None:
    settings = DmEnvRpcSettings(num_envs=1, **more)
    with pytest.raises(EndpointUnreachableError, match="nothing answers there"):
        RemoteVectorEnv(
            ConnectOptions(f"dm_env_rpc://{free_address()}", timeout_s=0.3), dm_env_rpc=settings
        )


@pytest.mark.parametrize(
    ("code", "error"),
    [(INVALID, RemoteEnvError), (PERMISSION_DENIED, AccessDeniedError)],
)
def test_a_final_refusal_is_reported_at_once(code: int, error: type[Exception]) -> None:
    with Peer(Conduct(refusals={"join_world": [code]})) as peer:
        with pytest.raises(error, match="no join_world now"):
            vector(peer, 1)

        assert peer.kinds() == ["create_world", "join_world"]


def test_a_server_that_stays_full_is_called_full() -> None:
    conduct = Conduct(refusals={"join_world": [EXHAUSTED] * 99})
    with Peer(conduct) as peer, pytest.raises(CapacityError, match="no join_world now"):
        vector(peer, 1, wait_s=0.3)


def test_a_server_that_breaks_when_asked_for_the_contract_need_not_be_asked() -> None:
    with Peer() as peer:
        vector(peer, 1, asks_contract=False).close()

        assert all(kind != "extension" for _, kind, _ in peer.requests)


def test_a_join_may_be_answered_late() -> None:
    with Peer(Conduct(refusals={"join_world": [LATE]})) as peer:
        env = vector(peer, 1)
        env.reset()
        env.close()

        assert peer.kinds().count("join_world") == 1


def test_a_join_without_an_answer_ends_at_the_deadline() -> None:
    conduct = Conduct(refusals={"join_world": [SILENT]})
    limit = r"no answer within 0\.3 s$"
    with Peer(conduct) as peer, pytest.raises(EndpointTimeoutError, match=limit):
        vector(peer, 1, wait_s=0.3)


def test_a_world_may_admit_no_agent_until_all_are_there() -> None:
    with Peer(Conduct(quorum=3)) as peer:
        env = vector(peer, 3, one_world=True)
        env.reset()
        assert env.step(moves(1, 0, -1))[0]["place"]["at"][:, 0].tolist() == [1, 0, -1]
        env.close()


def test_no_other_client_sends_batches() -> None:
    with Peer() as peer, pytest.raises(ConfigurationError, match="publishes no rlmesh"):
        RemoteVectorEnv(peer.address, dm_env_rpc=DmEnvRpcSettings(batched=True))


def test_asking_joins_for_a_moment_with_one_lane() -> None:
    with Peer() as peer:
        answer = probe_endpoint(
            ConnectOptions(peer.address, dialect_settings=DmEnvRpcSettings(num_envs=5))
        )

        assert peer.kinds().count("join_world") == peer.kinds().count("leave_world") == 1
    assert answer.contract.num_envs == 5  # type: ignore[attr-defined]


def test_evaluate_runs_episodes_there() -> None:
    with Peer() as peer:
        result = evaluate(peer.address, lambda _: moves(1), episodes=3)

    assert [episode.length for episode in result.episodes] == [3, 3, 3]
    assert [episode.episode_return for episode in result.episodes] == [306.0] * 3


def test_evaluate_takes_lanes_that_are_open() -> None:
    with Peer() as peer:
        env = vector(peer, 3, truncate_on_terminated=True)
        result = evaluate(env, lambda _: moves(1, 1, 1), episodes=4)
        env.close()

    assert all(episode.truncated for episode in result.episodes)


@pytest.mark.parametrize(
    "make",
    [
        lambda address: RemoteEnv(address, transport="shared_memory"),
        lambda address: RemoteEnv(ConnectOptions(address, edition_text="rlmesh-0.1.0b3")),
        lambda address: RemoteEnv(address[13:], dm_env_rpc=DmEnvRpcSettings()),
    ],
)
def test_options_of_the_other_protocol_are_refused(make: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigurationError, match="dm_env_rpc"):
        make("dm_env_rpc://127.0.0.1:1")


def test_there_are_no_calls_into_environments() -> None:
    with Peer() as peer:
        env = vector(peer, 1)
        with pytest.raises(ConfigurationError, match="no calls such as 'gravity'"):
            env.call("gravity")
        assert env.render() is None
        env.close()
        with pytest.raises(EndpointClosedError):
            env.reset()


def test_without_the_extra_its_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "rlmesh_ray.dialects.dm_env_rpc.client.env_session_client", None
    )

    with pytest.raises(ConfigurationError, match=r"\.\[dm-env-rpc\]"):
        RemoteEnv("dm_env_rpc://127.0.0.1:1")
