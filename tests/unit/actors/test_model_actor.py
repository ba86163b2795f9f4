"""The options of policies that Ray hosts, without Ray."""

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.actors import model_actor, model_fleet
from rlmesh_ray.actors.evaluation import evaluate_on_ray
from rlmesh_ray.actors.model_actor import ModelServiceActor
from rlmesh_ray.actors.model_fleet import ModelFleet
from rlmesh_ray.evaluation import evaluate
from rlmesh_ray.models import load_policy
from rlmesh_ray.server.model_server import ModelServer
from rlmesh_ray.spaces.observation_map import ObservationMap

NOT_OF_ACTORS = {"tls", "no_token", "allow_shutdown", "stop_on_close", "spin"}
NOT_OF_ACTORS |= {"openpi", "openpi_env"}
NOT_OF_FLEETS = {"address", "endpoint_id", "accept_edition_texts", "dialects"}
CHOSEN: dict[str, Any] = {"horizon": 4, "chunk_replay": "kept", "observation_map": ["a=b"]}


def options_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_actors_and_fleets_take_the_options_of_a_server() -> None:
    wanted = options_of(ModelServer) | options_of(load_policy) - {"checkpoint"}

    assert wanted - options_of(ModelServiceActor.remote) == NOT_OF_ACTORS
    assert wanted - options_of(ModelFleet) == NOT_OF_ACTORS | NOT_OF_FLEETS


def test_evaluation_on_ray_takes_the_options_of_evaluation() -> None:
    assert options_of(evaluate) <= options_of(evaluate_on_ray)
    own_map = ObservationMap(["image=channels(resize(pixels,8,8),first)"])
    assert pickle.loads(pickle.dumps(own_map)).lines() == own_map.lines()


class Replicas:
    """Stands for the class of the actors, and for an actor."""

    given: dict[str, Any]

    def options(self, **options: Any) -> "Replicas":
        return self

    def remote(self, *_: object, **given: Any) -> "Replicas":
        self.given = given
        return self

    address = withdraw = SimpleNamespace(remote=lambda *_: None)


@pytest.mark.parametrize("start", ["actor", "fleet"])
def test_options_of_chunks_and_maps_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    replicas = Replicas()
    for module in (model_actor, model_fleet):
        monkeypatch.setattr(module, "ModelReplica", replicas)
        monkeypatch.setattr(module, "start_weight_store", lambda *_: None)
    for name in ("shared_registry", "await_start"):
        monkeypatch.setattr(model_fleet, name, lambda *_: None)
    if start == "actor":
        ModelServiceActor.remote("own:make", **CHOSEN)
    else:
        ModelFleet("own:make", name="chunks", **CHOSEN)

    reached = {**replicas.given["policy_options"], **replicas.given["server_options"]}

    assert CHOSEN.items() <= reached.items()
    assert options_of(model_actor.place_on_device) >= replicas.given["policy_options"].keys()
    assert options_of(ModelServer) >= replicas.given["server_options"].keys()
