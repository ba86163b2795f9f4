import math
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_options import (
    LAST_VERSION,
    checked_version,
    require_count,
    require_duration,
    version_after,
)


@pytest.mark.parametrize("value", [0, -3, 1.5, "1", True, None, math.nan])
def test_a_count_is_a_whole_number_from_one_on(value: object) -> None:
    require_count("rows", 1)
    with pytest.raises(ConfigurationError, match=r"^rows=.* must be a whole number, 1 or more"):
        require_count("rows", value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, "1", True, None])
def test_a_duration_is_a_number_of_seconds_above_zero(value: object) -> None:
    require_duration("wait_s", 0.1)
    require_duration("wait_s", math.inf)
    with pytest.raises(ConfigurationError, match=r"^wait_s=.* must be a number of seconds"):
        require_duration("wait_s", value)


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
    [{"torch_threads": 0}, {"torch_threads": "x"}, {"stuck_after_s": math.nan}, {"max_rows": 1.5}],
)
def test_a_host_is_not_made_with_what_would_fail_in_use(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ModelHost(object(), **{"max_rows": 1, **options})  # type: ignore[arg-type]
