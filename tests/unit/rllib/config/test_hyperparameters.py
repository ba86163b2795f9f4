import math
from datetime import date
from typing import Any

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.hyperparameters import algorithm_config, set_hyperparameters


def config_with(settings: dict[str, Any], algo: str = "PPO") -> AlgorithmConfig:
    config = algorithm_config(algo)
    set_hyperparameters(config, settings)
    return config


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"lr": 1e-4}, "lr", 1e-4),
        ({"lr": [[0, 1e-4], [1000, 1e-5]]}, "lr", [[0, 1e-4], [1000, 1e-5]]),
        ({"training.gamma": 0.9}, "gamma", 0.9),
        ({"training": {"lambda_": 0.8}}, "lambda_", 0.8),
        ({"gamma": 1}, "gamma", 1),
        ({"grad_clip": None}, "grad_clip", None),
        ({"use_critic": False}, "use_critic", False),
        ({"train_batch_size_per_learner": 512}, "train_batch_size_per_learner", 512),
        ({"rollout_fragment_length": "auto"}, "rollout_fragment_length", "auto"),
        ({"learner_config_dict": {"a": [1, None]}}, "learner_config_dict", {"a": [1, None]}),
    ],
)
def test_arguments_are_set_by_name(settings: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(config_with(settings), name) == value


def test_entries_of_dicts_are_set_and_other_entries_stay() -> None:
    buffer = config_with({"replay_buffer_config.capacity": 1000}, "DQN").replay_buffer_config

    assert buffer["capacity"] == 1000
    assert buffer["type"] == "PrioritizedEpisodeReplayBuffer"


def test_the_default_module_is_set_field_by_field() -> None:
    config = config_with(
        {"model_config.fcnet_hiddens": [8], "model_config": {"fcnet_activation": "relu"}}
    )

    assert config.model_config["fcnet_hiddens"] == [8]
    assert config.model_config["fcnet_activation"] == "relu"


def test_a_limit_that_rllib_documents_as_infinite_may_be() -> None:
    config = config_with({"model_config.log_std_clip_param": math.inf})

    assert config.model_config["log_std_clip_param"] == math.inf


def test_a_list_is_given_where_rllib_wants_a_tuple() -> None:
    settings = {"n_step": [2, 5], "rollout_fragment_length": "auto"}

    assert config_with(settings, "DQN").n_step == (2, 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gama": 0.9}, "there is no hyperparameter gama; did you mean gamma"),
        ({"training.gama": 0.9}, "no hyperparameter training.gama; did you mean gamma"),
        ({"": 1}, "there is no hyperparameter ; names are those of the arguments of"),
        ({"training": 1}, "there is no hyperparameter training"),
        ({"model_config.fcnet_hidden": [8]}, "did you mean fcnet_hiddens"),
        ({"model_config": {"fcnet_hiddens": "x"}}, "fcnet_hiddens='x' is a str; give List"),
        ({"model_config": 3}, "is a int; give a dict"),
        ({"lr": "fast"}, "lr='fast' is a str; give float or "),
        ({"gamma": True}, "gamma=True is a bool; give float"),
        ({"minibatch_size": 12.5}, "minibatch_size=12.5 is a float; give int"),
        ({"use_critic": "yes"}, "use_critic='yes' is a str; give bool"),
        ({"lr.start": 1}, "lr.start: lr is no dict"),
        ({"rollout_fragment_length": "x"}, "RLlib refuses rollout_fragment_length='x'"),
        ({"learner_class": "os.system"}, "learner_class='os.system' is a str"),
        ({"num_epochs": 0}, "num_epochs=0 must be 1 or more"),
        ({"training": {"minibatch_size": -3}}, "training.minibatch_size=-3 must be 1 or more"),
        ({"train_batch_size_per_learner": 0}, "train_batch_size_per_learner=0 must be 1 or more"),
        ({"model_config": {"fcnet_hiddens": [64, 0]}}, "fcnet_hiddens=[64, 0] must be 1 or more"),
        ({"lr": -1}, "lr=-1 is no learning rate; give 0 or more"),
        ({"lr": [[0, 1e-3], [10, -1e-3]]}, "is no learning rate"),
        ({"lr": math.nan}, "lr=nan is not finite; give a finite number"),
        ({"lr": [[0, 1e-3], [10, math.inf]]}, "lr=inf is not finite"),
        ({"training": {"gamma": math.nan}}, "training.gamma=nan is not finite"),
        ({"clip_param": math.inf}, "clip_param=inf is not finite"),
        ({"model_config": {"log_std_clip_param": math.nan}}, "log_std_clip_param=nan is not fin"),
        (
            {"learner_config_dict": {"a": [date(2020, 1, 1)]}},
            "learner_config_dict.a=datetime.date(2020, 1, 1) is a date; give a number, a text",
        ),
        ({"learner_config_dict": {"a": {1: 2}}}, "learner_config_dict.a: the key 1 is no text"),
        ({"lr": [[5, 1e-3]]}, "RLlib refuses lr=[[5, 0.001]]: Invalid `lr`"),
        (
            {"gamma": 0.9, "minibatch_size": 4096},
            "RLlib refuses minibatch_size=4096: `minibatch_size` (4096) must be <= `train_batch",
        ),
        ({"entropy_coeff": -1.0}, "RLlib refuses entropy_coeff=-1.0: `entropy_coeff` must be >= 0"),
        ({"num_env_runners": 1}, "use --num-env-runners"),
        ({"model": {"fcnet_hiddens": [8]}}, "use model_config"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_can(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        config_with(settings)

    assert words in str(refused.value)
    assert "suppress" not in str(refused.value)


def test_settings_that_are_valid_only_together_are_taken_in_any_order() -> None:
    settings = {"minibatch_size": 4096, "train_batch_size_per_learner": 8192, "lr": 0}

    assert config_with(settings).minibatch_size == 4096
    assert not config_with(settings)._is_frozen
