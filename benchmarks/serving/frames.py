"""Frames that the raw clients send, made beforehand, and how they distinguish answers from errors.

Each server under test has its dialect: this package's, the same frames sent back (the no-op
server's), and that of the released rlmesh. All have rows of four float32 and two actions, except
for this package's with images.
"""

import functools
import math
import random
import struct
from typing import Protocol

from benchmarks.serving.protobuf import field, fields
from rlmesh_ray.errors import CodecError, RemoteModelError
from rlmesh_ray.protocol.messages import ConfigureRoute, Predict, PredictContext, PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.protobuf import parse
from rlmesh_ray.wire.rlmesh_v1 import model as wire

SERVICE = "rlmesh.model.v1.ModelService"
JOIN = f"/{SERVICE}/Join"

_ROW = struct.pack("<4f", 0.01, -0.02, 0.03, -0.04)
_IMAGE_SHAPE = (84, 84, 4)
_IMAGE_BYTES = math.prod(_IMAGE_SHAPE)
_IMAGE = random.Random(0).randbytes(_IMAGE_BYTES)
_SESSION = "bench"
_BOUND = 100.0


class Dialect(Protocol):
    """The frames of one kind of server."""

    def opening(self, route: str, rows: int) -> bytes:
        """Return what opens a route."""

    def request(self, route: str, rows: int, request_id: str) -> bytes:
        """Return what asks for actions for ``rows`` rows."""

    def check_opened(self, answer: bytes) -> None:
        """Make sure that the route is open.

        Raises:
            RemoteModelError: The server refused.
            CodecError: It answered something else.
        """

    def answered(self, answer: bytes) -> str:
        """Return which request a prediction answers.

        Raises:
            RemoteModelError: The answer is an error.
            CodecError: It is anything else but a prediction.
        """


class OurFrames:
    """Frames of edition 2026.06, as this package has them.

    Args:
        is_image: Whether a row is an image, 84x84x4 uint8, in place of four float32.
    """

    _answers: type[pb.JoinResponse | pb.JoinRequest] = pb.JoinResponse

    def __init__(self, *, is_image: bool = False) -> None:
        self._contract = image_contract if is_image else contract
        self._row = _IMAGE if is_image else _ROW

    def opening(self, route: str, rows: int) -> bytes:
        """See ``Dialect``."""
        context = PredictContext(_SESSION, route, f"open-{route}")
        return wire.pack_request(ConfigureRoute(context.request_id, context, self._contract(rows)))

    def request(self, route: str, rows: int, request_id: str) -> bytes:
        """See ``Dialect``."""
        slots = tuple(PredictSlot(lane, f"episode-{lane}", 1, False) for lane in range(rows))
        context = PredictContext(_SESSION, route, request_id, slots)
        return wire.pack_request(Predict(request_id, context, self._row * rows))

    def check_opened(self, answer: bytes) -> None:
        """See ``Dialect``."""
        self._read(answer, "configure_route")

    def answered(self, answer: bytes) -> str:
        """See ``Dialect``."""
        return self._read(answer, "predict").request_id

    def _read(self, answer: bytes, wanted: str) -> pb.JoinResponse | pb.JoinRequest:
        message = parse(self._answers, answer)
        kind = message.WhichOneof("kind")
        if kind == wanted:
            return message
        if isinstance(message, pb.JoinResponse) and kind == "error":
            error = message.error
            code = pb.ModelErrorCode.Name(error.code).removeprefix("MODEL_ERROR_CODE_")
            raise RemoteModelError(code, error.message, error.is_recoverable)
        raise CodecError(f"{kind or 'nothing'} came where {wanted} was to be answered")


class EchoedFrames(OurFrames):
    """The same frames, when the server sends back what it gets."""

    _answers = pb.JoinRequest


class ReleasedFrames:
    """Frames of the released rlmesh 0.1.0, generation rlmesh-wire-v1; numbers as it has them."""

    _RESOLVED, _PREDICTED, _ERROR, _REQUEST_ID = 1, 2, 10, 5

    def opening(self, route: str, rows: int) -> bytes:
        """See ``Dialect``."""
        del rows  # the request does not contain the width
        request_id = f"open-{route}"
        low, high = struct.pack("<f", -_BOUND), struct.pack("<f", _BOUND)
        float32, int64 = 11, 9
        bounds = field(10, field(2, field(1, low) + field(2, high)))
        observation = field(1, bytes([4])) + field(2, float32) + bounds
        action = field(2, int64) + field(11, field(1, 2))
        spec = field(1, "CartPole-v1") + field(2, action) + field(3, observation)
        context = self._context(route, request_id)
        body = field(1, context) + field(2, spec) + field(3, "2026.06")
        return field(1, body) + field(5, request_id)

    def request(self, route: str, rows: int, request_id: str) -> bytes:
        """See ``Dialect``."""
        episodes = b"".join(field(3, field(1, f"{route}-episode-{lane}")) for lane in range(rows))
        value = field(1, _ROW * rows)
        body = field(1, self._context(route, request_id)) + field(2, value) + episodes
        return field(2, body) + field(5, request_id)

    def check_opened(self, answer: bytes) -> None:
        """See ``Dialect``."""
        self._read(answer, self._RESOLVED)

    def answered(self, answer: bytes) -> str:
        """See ``Dialect``."""
        return self._read(answer, self._PREDICTED)

    def _context(self, route: str, request_id: str) -> bytes:
        return field(1, _SESSION) + field(2, route) + field(3, request_id)

    def _read(self, answer: bytes, wanted: int) -> str:
        parts = dict(fields(answer))
        if self._ERROR in parts:
            message = dict(fields(parts[self._ERROR])).get(2, b"").decode(errors="replace")
            raise RemoteModelError("ERROR", message, is_recoverable=True)
        if wanted not in parts:
            raise CodecError(f"field {wanted} is not in the answer, which has {sorted(parts)}")
        return parts.get(self._REQUEST_ID, b"").decode(errors="replace")


@functools.cache
def contract(rows: int) -> EnvContract:
    """Return the contract of all routes of ``rows`` lanes."""
    low, high = struct.pack("<f", -_BOUND), struct.pack("<f", _BOUND)
    return EnvContract(
        id="CartPole-v1",
        observation_space=BoxSpec((4,), "float32", low, high),
        action_space=DiscreteSpec(2),
        num_envs=rows,
        autoreset_mode=AutoresetMode.DISABLED,
    )


@functools.cache
def image_contract(rows: int) -> EnvContract:
    """Return the contract of routes of ``rows`` lanes that observe images."""
    low, high = bytes(_IMAGE_BYTES), b"\xff" * _IMAGE_BYTES
    return EnvContract(
        id="Images-v0",
        observation_space=BoxSpec(_IMAGE_SHAPE, "uint8", low, high),
        action_space=DiscreteSpec(6),
        num_envs=rows,
        autoreset_mode=AutoresetMode.DISABLED,
    )


DIALECTS: dict[str, Dialect] = {
    "ours": OurFrames(),
    "ours-images": OurFrames(is_image=True),
    "echo": EchoedFrames(),
    "released": ReleasedFrames(),
}
