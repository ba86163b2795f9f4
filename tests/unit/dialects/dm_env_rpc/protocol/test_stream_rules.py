"""What a stream may ask for when."""

from typing import get_args

import pytest

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import (
    Code,
    JoinWorld,
    LeaveWorld,
    ResetAgent,
    StepWorld,
    WorldRequest,
)
from rlmesh_ray.dialects.dm_env_rpc.protocol.stream_rules import (
    PERMISSIONS,
    Permission,
    permission_error,
)


@pytest.mark.parametrize("is_joined", [False, True])
def test_every_request_has_a_ruling(is_joined: bool) -> None:
    assert set(PERMISSIONS[is_joined]) == set(get_args(WorldRequest))


@pytest.mark.parametrize("request_", [StepWorld({}, ()), ResetAgent({})])
def test_only_agents_step_and_reset(request_: WorldRequest) -> None:
    refusal = permission_error(request_, is_joined=False)

    assert refusal is not None
    assert refusal.code is Code.FAILED_PRECONDITION
    assert permission_error(request_, is_joined=True) is None


def test_a_stream_joins_once() -> None:
    assert permission_error(JoinWorld("x", {}), is_joined=False) is None
    assert permission_error(JoinWorld("x", {}), is_joined=True) is not None


def test_leaving_without_having_joined_is_nothing() -> None:
    assert PERMISSIONS[False][LeaveWorld] is Permission.NOTHING
    assert permission_error(LeaveWorld(), is_joined=False) is None
