import math
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import completed
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.model_options import (
    LAST_VERSION,
    ModelServerOptions,
    checked_version,
    version_after,
)


@pytest.mark.parametrize("value", [1, 2**63 - 1, np.int64(4)])
def test_a_version_becomes_a_plain_integer(value: Any) -> None:
    version = checked_version(value)

    assert version == value
    assert type(version) is int


@pytest.mark.parametrize("value", [0, -1, 2**63, 2**70, 1.5, math.nan, "3", True, [1]])
def test_what_clients_could_not_read_is_no_version(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"must be an integer from 1 to 2\*\*63 - 1"):
        checked_version(value)


def test_versions_come_to_an_end() -> None:
    assert version_after(LAST_VERSION - 1) == LAST_VERSION
    with pytest.raises(ConfigurationError, match="no version is left"):
        version_after(LAST_VERSION)


@pytest.mark.parametrize(
    "options",
    [
        {"torch_threads": 0},
        {"torch_threads": "x"},
        {"max_batch_rows": 1.5},
        {"max_delay_s": -0.001},
        {"max_delay_s": math.nan},
        {"max_delay_s": "1"},
        {"max_delay_s": 60.1},
    ],
)
def test_options_that_would_fail_in_use_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        completed("ModelServer", ModelServerOptions, options)


def host_of(policy: Any) -> Batcher:
    return Batcher(policy, 1)


@pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, "1", True])
def test_weights_are_not_replaced_within_what_is_no_time(timeout_s: Any) -> None:
    host = host_of(object())

    with pytest.raises(ConfigurationError, match=r"^timeout_s=.* finite number of seconds, 0"):
        host.set_weights({}, version=None, timeout_s=timeout_s)
    assert host.policy_version == 0
    host.close()


def test_a_time_may_be_a_number_of_numpys() -> None:
    host = host_of(object())

    with pytest.raises(ConfigurationError, match="weights"):  # it waited, and got the error
        host.set_weights({}, version=None, timeout_s=np.float32(20.0))  # type: ignore[arg-type]
    host.close()
