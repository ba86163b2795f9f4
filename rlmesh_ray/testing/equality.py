"""Bitwise equality of nested values, for comparing trajectories."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def assert_identical(actual: Any, expected: Any, where: str = "value") -> None:
    """Fail unless two nested values are bitwise equal, with equal dtypes and shapes.

    The order of a mapping's keys does not count: infos lose it on the wire.

    Args:
        actual: Arrays, numbers, strings, and mappings and sequences of these.
        expected: A value of the same form.
        where: Name of the value in the message.

    Raises:
        AssertionError: They differ; the message says where.
    """
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{where}: {actual!r} is no mapping"
        assert set(actual) == set(expected), f"{where}: keys {set(actual)}, {set(expected)}"
        for key in expected:
            assert_identical(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (tuple, list)) or (
        isinstance(expected, np.ndarray) and expected.dtype == object
    ):
        assert type(actual) is type(expected), f"{where}: {actual!r} is no {type(expected)}"
        assert len(actual) == len(expected), f"{where}: {len(actual)} parts, {len(expected)}"
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(left, right, f"{where}[{index}]")
    elif isinstance(expected, (np.ndarray, np.generic, float)):
        left, right = np.asarray(actual), np.asarray(expected)
        assert left.dtype == right.dtype, f"{where}: {left.dtype}, expected {right.dtype}"
        assert left.shape == right.shape, f"{where}: shape {left.shape}, expected {right.shape}"
        assert left.tobytes() == right.tobytes(), f"{where}: {left}, expected {right}"
    else:
        assert actual == expected, f"{where}: {actual!r}, expected {expected!r}"
