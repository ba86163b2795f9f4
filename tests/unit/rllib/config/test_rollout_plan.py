import dataclasses
from typing import Any

import pytest

from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.config.rollout_plan import (
    Access,
    CombinedResolver,
    FixedAddressResolver,
    RolloutPlan,
    require_next_step,
)
from rlmesh_ray.rllib.config.session_endpoints import SessionLayout
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract, require_same_contract
from rlmesh_ray.spaces.spec import DiscreteSpec

CONTRACT = EnvContract("Toy-v0", DiscreteSpec(5), DiscreteSpec(2), 4, AutoresetMode.NEXT_STEP)
ADDRESSES = FixedAddressResolver(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))
JOINED = CombinedResolver.of([ADDRESSES])


def dial_of(plan: RolloutPlan, endpoint: int) -> ConnectOptions:
    resolver, index = plan.resolver.places[endpoint]
    return plan.connect_options(endpoint, resolver.assign("a session", index, "a node"))


@pytest.mark.parametrize("wrong", [{"token": 5}, {"tls": "ca.pem"}, {"edition_text": 2026}])
def test_what_lets_in_is_of_the_right_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Access(**wrong)


def test_a_runner_has_the_lanes_of_all_its_sessions() -> None:
    plan = RolloutPlan(JOINED, CONTRACT, SessionLayout(3, 1, 3))

    assert plan.lanes_per_runner == 12
    assert [dial_of(plan, endpoint).address for endpoint in plan.endpoints_of(0)] == [
        "127.0.0.1:1",
        "127.0.0.1:2",
        "127.0.0.1:3",
    ]


def test_runners_that_train_and_that_evaluate_find_their_own_endpoints() -> None:
    plan = RolloutPlan(
        JOINED, CONTRACT, SessionLayout(2, 2, 1), SessionLayout(1, 1, 1, first_endpoint=2)
    )

    assert [plan.endpoints_of(worker) for worker in (1, 2)] == [(0,), (1,)]
    assert plan.endpoints_of(1, in_evaluation=True) == (2,)


def test_an_evaluation_that_was_not_planned_goes_to_the_endpoints_of_training() -> None:
    plan = RolloutPlan(JOINED, CONTRACT, SessionLayout(3, 3, 1))

    assert plan.endpoints_of(2, in_evaluation=True) == plan.endpoints_of(2) == (1,)


def test_combined_resolvers_keep_their_order_and_ask_the_resolver_of_an_endpoint() -> None:
    joined = CombinedResolver.of([FixedAddressResolver(("127.0.0.1:9",)), ADDRESSES])

    found = [joined.address(index) for index in range(len(joined))]

    assert found == ["127.0.0.1:9", *ADDRESSES.addresses]


def test_each_endpoint_is_dialed_with_what_lets_in_there_and_with_nothing_else() -> None:
    accesses = (Access("a"), Access("b", ClientTls(), "0" * 64), Access())
    plan = RolloutPlan(JOINED, CONTRACT, SessionLayout(3, 1, 3), access=accesses)

    dials = [dial_of(plan, endpoint) for endpoint in range(3)]

    assert [connect_options.token for connect_options in dials] == ["a", "b", None]
    assert [connect_options.tls for connect_options in dials] == [None, ClientTls(), None]
    assert [connect_options.edition_text for connect_options in dials] == [None, "0" * 64, None]


def test_joined_directories_hand_each_session_to_the_one_that_owns_its_endpoint() -> None:
    first = FixedAddressResolver(("127.0.0.1:9",))
    plan = RolloutPlan(CombinedResolver.of([first, ADDRESSES]), CONTRACT, SessionLayout(4, 1, 4))

    assert [plan.resolver.places[endpoint] for endpoint in range(4)] == [
        (first, 0),
        (ADDRESSES, 0),
        (ADDRESSES, 1),
        (ADDRESSES, 2),
    ]


def test_a_fixed_address_has_an_assignment_for_every_session() -> None:
    assert ADDRESSES.assign("a session", 1, "a node") == Assignment("127.0.0.1:2")


def test_an_assignment_with_a_token_of_its_own_is_dialed_with_that_one_and_no_other() -> None:
    accesses = (Access("a", ClientTls()),)
    plan = RolloutPlan(JOINED, CONTRACT, SessionLayout(1, 1, 1), access=accesses)

    connect_options = plan.connect_options(
        0, Assignment("127.0.0.1:7", "elsewhere", token="theirs")
    )

    assert (connect_options.address, connect_options.token, connect_options.tls) == (
        "127.0.0.1:7",
        "theirs",
        ClientTls(),
    )


def test_tokens_do_not_show() -> None:
    plan = RolloutPlan(
        JOINED, CONTRACT, SessionLayout(3, 1, 3), access=(Access("open-sesame"),) * 3
    )

    assert "open-sesame" not in repr(plan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_envs": 5}, "num_envs = 5 where 4 is expected"),
        (
            {"autoreset_mode": AutoresetMode.DISABLED},
            "autoreset_mode = disabled where next_step is expected",
        ),
        ({"observation_space": DiscreteSpec(6)}, "observation_space: n 6 where 5 is expected"),
        (
            {"action_space": DiscreteSpec(3), "num_envs": 5},
            "num_envs = 5 where 4 is expected; action_space: n 3 where 2 is expected",
        ),
    ],
)
def test_an_endpoint_that_differs_is_refused_by_what_differs(
    change: dict[str, object], text: str
) -> None:
    other = dataclasses.replace(CONTRACT, **change)  # type: ignore[arg-type]

    with pytest.raises(ContractMismatchError) as refused:
        require_same_contract(CONTRACT, other, "127.0.0.1:1")

    assert f": {text}; all endpoints" in str(refused.value)


def test_names_and_metadata_may_differ() -> None:
    other = dataclasses.replace(CONTRACT, id="Other", metadata={"fps": 3}, render_mode="human")

    require_same_contract(CONTRACT, other, "127.0.0.1:1")


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
def test_lanes_that_only_reset_together_are_refused_where_rllib_needs_single_ones(
    mode: AutoresetMode,
) -> None:
    contract = dataclasses.replace(CONTRACT, autoreset_mode=mode)

    with pytest.raises(ContractMismatchError, match=f"{mode.option}.*next_step, or 1 lane"):
        require_next_step(contract, (), "127.0.0.1:1")

    require_next_step(contract, (capabilities.PARTIAL_RESET,), "127.0.0.1:1")
    require_next_step(dataclasses.replace(contract, num_envs=1), (), "127.0.0.1:1")
