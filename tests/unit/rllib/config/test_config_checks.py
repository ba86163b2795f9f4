"""Which settings of offline_data(output=...) runners can honour."""

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.dialects.rllink.runner.env_runner import configure_rllink
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.config_checks import require_recordable
from rlmesh_ray.testing.envs import SPACES


def recorded(**settings: Any) -> PPOConfig:
    return PPOConfig().offline_data(**{"output": "/data", **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"output": Path("/data")},
        {"output": "s3://bucket/data", "output_filesystem": "s3"},
        {"output_write_episodes": False, "output_write_method": "write_json"},
        {"output": None, "output_write_method": "write_nothing"},
        {"output": tune.choice(["/data", "/others"])},
    ],
)
def test_what_rllib_records_is_recorded(settings: dict[str, Any]) -> None:
    require_recordable(recorded(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "logdir"}, r"output='logdir'\) is of RLlib's old API stack; give a directory"),
        ({"output": lambda context: None}, "old API stack; give a directory"),
        ({"output_write_method": "write_nothing"}, "such as 'write_parquet'"),
        ({"output_write_method": "write_sql"}, "takes a path and a filesystem"),
        ({"output_write_method": "materialize"}, "takes a path and a filesystem"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_remedy(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_recordable(recorded(**settings))


def test_several_agents_are_not_recorded() -> None:
    with pytest.raises(ConfigurationError, match=r"one agent, as in RLlib.* leave output out"):
        require_recordable(recorded(), is_multi_agent=True)


def test_a_package_that_rllib_lacks_for_episodes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match="msgpack-numpy; install it, or set output_write_"):
        require_recordable(recorded())

    require_recordable(recorded(output_write_episodes=False))


def test_simulators_send_no_whole_episodes() -> None:
    spaces: Any = {"observation_space": SPACES["box"], "action_space": SPACES["box"]}

    with pytest.raises(ConfigurationError, match="in parts; set output_write_episodes=False"):
        configure_rllink(recorded(), **spaces)

    configure_rllink(recorded(output_write_episodes=False), **spaces)
