"""The options of what Ray hosts, without Ray."""

import inspect
import pickle
from typing import Any

import pytest

from docs import refresh
from rlmesh_ray import ListenOptions
from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.evaluation import evaluate_on_ray
from rlmesh_ray.actors.gateway import Gateway
from rlmesh_ray.actors.model_actor import ModelServiceActor
from rlmesh_ray.actors.model_fleet import ModelFleet
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.run import evaluate
from rlmesh_ray.models import load_policy
from rlmesh_ray.options import declared
from rlmesh_ray.rllib import configure, configure_rllink
from rlmesh_ray.server.env.env_options import EnvServerOptions
from rlmesh_ray.server.env.env_server import EnvServer
from rlmesh_ray.server.model.model_server import ModelServer
from rlmesh_ray.spaces.observation_map import ObservationMap

NOT_OF_ACTORS = {"tls", "allow_shutdown", "stop_on_close", "openpi_env"}


def options_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_actors_and_fleets_take_the_options_of_a_server() -> None:
    wanted = options_of(ModelServer) | options_of(load_policy) - {"checkpoint"}

    assert wanted - options_of(ModelServiceActor.remote) == NOT_OF_ACTORS
    assert wanted - options_of(ModelFleet) == NOT_OF_ACTORS


def test_whoever_starts_an_env_server_takes_all_of_its_options() -> None:
    wanted = options_of(EnvServer)
    of_actors = wanted - options_of(refresh.documented("rlmesh_ray.actors.EnvServiceActor"))
    of_one = {"token", "tls", "allow_shutdown"}

    assert wanted - {"env"} == declared(EnvServerOptions).keys()
    assert of_actors == {"tls", "allow_shutdown"}
    assert wanted - options_of(EnvFleet) == of_one
    assert wanted - options_of(configure) == {
        "address",
        "allow_shutdown",
    }  # token and TLS are its clients'


@pytest.mark.parametrize("name", ["tls", "allow_shutdown", "stop_on_close"])
def test_an_option_of_a_server_alone_is_refused_before_there_is_an_actor(name: str) -> None:
    given: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=name):
        ModelServiceActor.remote("random", **given)


@pytest.mark.parametrize(
    ("listen", "refused"),
    [
        (ListenOptions("127.0.0.1:7"), "takes no address='127.0.0.1:7': .*give addresses="),
        (ListenOptions(data_address="127.0.0.1:7"), "takes no data_address="),
        (ListenOptions(openpi="127.0.0.1:7"), "takes no openpi="),
    ],
)
def test_fleets_and_actors_refuse_what_is_one_endpoints_alone(
    listen: ListenOptions, refused: str
) -> None:
    for start in (
        lambda: EnvFleet("CartPole-v1", address=listen),
        lambda: ModelFleet("random", name="alone", address=listen),
    ):
        with pytest.raises(ConfigurationError, match=refused):
            start()
    if listen.address is None:
        with pytest.raises(ConfigurationError, match=f"ModelServiceActor {refused}"):
            ModelServiceActor.remote("random", address=listen)


@pytest.mark.parametrize("owner", [Gateway, configure_rllink])
def test_an_owner_of_a_token_says_how_to_do_without_one(owner: Any) -> None:
    message = rf"^{owner.__name__}\(\) takes no 'no_token' any more: give token=False$"
    with pytest.raises(TypeError, match=message):
        owner(no_token=True)


def test_evaluation_on_ray_takes_the_options_of_evaluation() -> None:
    assert options_of(evaluate) - options_of(evaluate_on_ray) == {"record"}
    own_map = ObservationMap(["image=channels(resize(pixels,8,8),first)"])
    assert pickle.loads(pickle.dumps(own_map)).lines() == own_map.lines()
