"""Reads the frames of a session with this package's codecs, and packs what it has read again."""

import dataclasses
from types import ModuleType
from typing import Any

from rlmesh_ray.dialects.released.wire import env as wire_env
from rlmesh_ray.dialects.released.wire import model as wire_model
from rlmesh_ray.dialects.released.wire import values as wire_values
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    EnvTimings,
    Predict,
    Predicted,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as released_env_pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as released_model_pb
from rlmesh_ray.wire.rlmesh_v1 import env as env_v1
from rlmesh_ray.wire.rlmesh_v1 import model as model_v1
from rlmesh_ray.wire.rlmesh_v1 import values as values_v1
from tests.golden.canonical import canonical
from tests.golden.corpus import Frame
from tests.golden.plain import plain

_CODECS: dict[str, dict[str, ModuleType]] = {
    "rlmesh_v1": {"env": env_v1, "model": model_v1, "values": values_v1},
    "rlmesh_wire_v1": {"env": wire_env, "model": wire_model, "values": wire_values},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A batch in a frame, and what becomes of it on the way through this package."""

    columns: list[Column]
    columns_again: list[Column]
    data: bytes
    data_again: bytes


class Reader:
    """Reads one session, frame by frame: what a batch holds, the contract before it tells."""

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._codecs = _CODECS[generation]
        self._is_released = generation == "rlmesh_wire_v1"
        self._contract: EnvContract | None = None
        self._requests: dict[str, Any] = {}
        self._routes: dict[str, EnvContract] = {}

    def read(self, frame: Frame) -> Any:
        """Return what ``frame`` says, as the messages of ``protocol``."""
        service, method = frame.call.split("/")
        codec, is_request = self._codecs[service], frame.way == ">"
        match method:
            case "Handshake":
                said = (
                    codec.HANDSHAKE.parse_request if is_request else codec.HANDSHAKE.parse_response
                )(frame.data)
                if isinstance(getattr(said, "contract", None), EnvContract):
                    self._contract = said.contract
            case "Shutdown":
                parse = (
                    codec.HANDSHAKE.parse_shutdown_request
                    if is_request
                    else codec.HANDSHAKE.parse_shutdown_response
                )
                said = parse(frame.data)
            case _:
                said = (codec.parse_request if is_request else codec.parse_response)(frame.data)
                if is_request:
                    self._requests[said.request_id] = said
                if isinstance(said, ConfigureRoute) and isinstance(said.contract, EnvContract):
                    self._routes[said.context.route_id] = said.contract
        return said

    def meaning(self, frame: Frame, said: Any) -> Any:
        """Return ``said``, read from ``frame``, as plain JSON, with batches taken apart."""
        told = plain(said) | self._batches(said)
        timings = self._timings(frame)
        return told if timings is None else told | {"timings": plain(timings)}

    def packed(self, frame: Frame, said: Any) -> Frame:
        """Return the frame that this package writes to say ``said``; arrays in infos are tagged."""
        return dataclasses.replace(frame, data=self._packed(frame, said, tag_arrays=True))

    def says_the_same(self, frame: Frame, said: Any) -> bool:
        """Tell whether this package writes ``frame`` to say ``said``, but for the order in it."""
        written = (self._packed(frame, said, tag_arrays=tagged) for tagged in (True, False))
        same = canonical(self._generation, frame)
        return any(
            canonical(self._generation, dataclasses.replace(frame, data=data)) == same
            for data in written
        )

    def _packed(self, frame: Frame, said: Any, *, tag_arrays: bool) -> bytes:
        service, method = frame.call.split("/")
        codec, is_request = self._codecs[service], frame.way == ">"
        match method, is_request:
            case "Handshake", True:
                data = codec.HANDSHAKE.pack_request(said)
            case "Handshake", False:
                data = codec.HANDSHAKE.pack_response(said)
            case "Shutdown", True:
                data = codec.HANDSHAKE.pack_shutdown_request(said.reason)
            case "Shutdown", False:
                data = codec.HANDSHAKE.pack_shutdown_response(
                    accepted=said.accepted, message=said.message
                )
            case _, True:
                data = codec.pack_request(said)
            case _ if service == "model":
                data = codec.pack_response(said)
            case _:
                data = codec.pack_response(said, tag_arrays=tag_arrays)
        timings = self._timings(frame)
        packed: bytes = data if timings is None else codec.with_timings(data, timings)
        return packed

    def batches(self, said: Any) -> list["Batch"]:
        """Return the batches of ``said``, decoded, and encoded again."""
        values = self._codecs["values"]
        batches = []
        for data, spec, columns, rows in self._columns(said).values():
            again = values.encode_batch(spec, columns, rows)
            batches.append(Batch(columns, values.decode_batch(spec, again, rows), data, again))
        return batches

    def _timings(self, frame: Frame) -> EnvTimings | dict[str, int] | None:
        if not self._is_released or frame.way == ">" or not frame.call.endswith("/Join"):
            return None
        if frame.call.startswith("model/"):
            return model_timings(frame.data)
        told = released_env_pb.JoinResponse.FromString(frame.data)
        return EnvTimings(*(getattr(told, field.name) for field in dataclasses.fields(EnvTimings)))

    def _batches(self, said: Any) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for place, (_, _, columns, _) in self._columns(said).items():
            name, _, index = place.partition(" ")
            told_columns = [plain(column) for column in columns]
            if index:
                told.setdefault(name, []).append(told_columns)
            else:
                told[name] = told_columns
        return told

    def _columns(self, said: Any) -> dict[str, tuple[bytes, SpaceSpec, list[Column], int]]:
        """Return the batches of ``said`` by their place, with their spec and number of rows."""
        found = {}
        for place, data, spec, rows in self._places(said):
            if spec is not None:
                columns = self._codecs["values"].decode_batch(spec, data, rows)
                found[place] = (data, spec, columns, rows)
        return found

    def _places(self, said: Any) -> list[tuple[str, bytes, SpaceSpec | None, int]]:
        match said:
            case Step() | StepDone() | ResetDone():
                contract = self._contract
                if contract is None:
                    return []
                asked = self._requests.get(said.request_id)
                rows = len(getattr(asked, "env_indices", ())) or contract.num_envs
                if isinstance(said, Step):
                    return [("action", said.action, contract.action_space, rows)]
                return [("observation", said.observation, contract.observation_space, rows)]
            case Predict():
                route, rows = self._route_of(said)
                return [("observation", said.observation, route.observation_space, rows)]
            case Predicted():
                route, rows = self._route_of(self._requests[said.request_id])
                later = enumerate(said.later)
                return [
                    ("action", said.action, route.action_space, rows),
                    *((f"later {n}", data, route.action_space, rows) for n, data in later),
                ]
        return []  # no peer sends groups

    def _route_of(self, said: Any) -> tuple[EnvContract, int]:
        route = self._routes[said.context.route_id]
        return route, len(said.context.slots) or route.num_envs


def model_timings(data: bytes) -> dict[str, int]:
    """Return the timings behind a response of a released ModelService, by their fields' names."""
    message = released_model_pb.JoinResponse.FromString(data)
    numbers = [field.name for field in message.DESCRIPTOR.fields if field.type == field.TYPE_UINT64]
    told = [*numbers, "in_flight", "held_episodes"]
    return {name: getattr(message, name) for name in told if message.HasField(name)}
