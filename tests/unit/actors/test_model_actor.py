"""The options of policies that Ray hosts, without Ray."""

import inspect
import pickle
from typing import Any

from rlmesh_ray.actors.evaluation import evaluate_on_ray
from rlmesh_ray.actors.model_actor import ModelServiceActor
from rlmesh_ray.actors.model_fleet import ModelFleet
from rlmesh_ray.evaluation import evaluate
from rlmesh_ray.models import load_policy
from rlmesh_ray.server.model_server import ModelServer
from rlmesh_ray.spaces.observation_map import ObservationMap

NOT_OF_ACTORS = {"tls", "no_token", "allow_shutdown", "stop_on_close"}
NOT_OF_ACTORS |= {"openpi", "openpi_env"}
NOT_OF_FLEETS = {"address", "endpoint_id", "accept_edition_texts", "dialects"}


def options_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_actors_and_fleets_take_the_options_of_a_server() -> None:
    wanted = options_of(ModelServer) | options_of(load_policy) - {"checkpoint"}

    assert wanted - options_of(ModelServiceActor.remote) == NOT_OF_ACTORS
    assert wanted - options_of(ModelFleet) == NOT_OF_ACTORS | NOT_OF_FLEETS


def test_evaluation_on_ray_takes_the_options_of_evaluation() -> None:
    assert options_of(evaluate) - options_of(evaluate_on_ray) == {"record"}
    own_map = ObservationMap(["image=channels(resize(pixels,8,8),first)"])
    assert pickle.loads(pickle.dumps(own_map)).lines() == own_map.lines()
