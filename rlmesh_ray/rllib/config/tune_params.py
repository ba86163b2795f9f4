"""Settings that Tune has yet to choose, which cannot be checked on the driver."""

import dataclasses
from collections.abc import Mapping

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.search.sample import Domain


def is_tune_param(config: AlgorithmConfig, *names: str) -> bool:
    return any(_is_search(getattr(config, name, None)) for name in names)


def _is_search(value: object) -> bool:
    if isinstance(value, Domain):
        return True
    if isinstance(value, Mapping):
        return "grid_search" in value or any(map(_is_search, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_search, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(map(_is_search, vars(value).values()))
    return False
