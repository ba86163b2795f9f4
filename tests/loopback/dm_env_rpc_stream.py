"""A dm_env_rpc stream of raw messages, for tests that send what no stock client would."""

import queue
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils

from tests.loopback.ports import plain_channel

PROCESS = "/dm_env_rpc.v1.Environment/Process"
DEADLINE_S = 60.0
RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3


def tensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``values``, by uid or key, as messages."""
    return {key: tensor_utils.pack_tensor(value) for key, value in values.items()}


class DmStream:
    """One stream on a channel of its own; requests are sent without waiting for answers.

    Args:
        address: Of the endpoint.
        token: What to show.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._channel = plain_channel(address)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = [("authorization", f"Bearer {token}")] if token else None
        self._call: Any = self._channel.stream_stream(PROCESS)(
            iter(self._outbox.get, None), timeout=DEADLINE_S, metadata=metadata
        )
        self.specs: Any = None

    def send_raw(self, data: bytes) -> None:
        self._outbox.put(data)

    def send(self, **payload: Any) -> None:
        self.send_raw(pb.EnvironmentRequest(**payload).SerializeToString())

    def finish(self) -> None:
        """Send nothing more; answers still come."""
        self._outbox.put(None)

    def receive_raw(self) -> bytes:
        data: bytes = next(self._call)
        return data

    def receive(self) -> Any:
        return pb.EnvironmentResponse.FromString(self.receive_raw())

    def rest(self) -> list[Any]:
        return [pb.EnvironmentResponse.FromString(data) for data in self._call]

    def ask(self, **payload: Any) -> Any:
        self.send(**payload)
        return self.receive()

    def refused(self, **payload: Any) -> Any:
        """Return the Status that answers a request which must not succeed."""
        response = self.ask(**payload)
        assert response.WhichOneof("payload") == "error", response
        return response.error

    def create(self, **settings: Any) -> str:
        response = self.ask(create_world={"settings": tensors(_dotted(settings))})
        assert response.WhichOneof("payload") == "create_world", response
        return str(response.create_world.world_name)

    def join(self, world_name: str = "", **settings: Any) -> Self:
        response = self.ask(join_world={"world_name": world_name, "settings": tensors(settings)})
        assert response.WhichOneof("payload") == "join_world", response
        self.specs = response.join_world.specs
        return self

    def uid(self, name: str) -> int:
        """Return the uid of an observation."""
        specs = self.specs.observations
        return int(next(uid for uid in specs if specs[uid].name == name))

    def step_request(
        self, actions: Mapping[int, Any] | None = None, names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        known = self.specs.observations
        uids = [self.uid(name) for name in names] if names is not None else list(known)
        return {"step": {"actions": tensors(actions or {}), "requested_observations": uids}}

    def step(
        self, actions: Mapping[int, Any] | None = None, names: Iterable[str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Step; return the state and the observations by name."""
        return self.stepped(self.ask(**self.step_request(actions, names)))

    def stepped(self, response: Any) -> tuple[int, dict[str, Any]]:
        assert response.WhichOneof("payload") == "step", response
        observations = response.step.observations
        return int(response.step.state), {
            self.specs.observations[uid].name: tensor_utils.unpack_tensor(observations[uid])
            for uid in observations
        }

    def close(self) -> None:
        """Vanish."""
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in settings.items()}
