"""RemoteModel: a served policy, from anywhere."""

import operator
import uuid
from collections.abc import Mapping, Sequence, Sized
from dataclasses import Field, dataclass, fields
from typing import Any, Self

import gymnasium
import numpy as np

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.fork_guard import NotPicklable
from rlmesh_ray.client.image_route import ImageRoute
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.client.model_dialect import PredictTelemetry
from rlmesh_ray.client.model_handshake import handshake, shake_hands
from rlmesh_ray.client.model_session_stream import ModelSessionStream
from rlmesh_ray.errors import ConfigurationError, ConformanceError, LocalProtocolError
from rlmesh_ray.options import DEFAULT_STEP_TIMEOUT_S, require_seconds
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import coerce_batch


def contract_of(env: Any) -> EnvContract:
    """Return the contract of ``env``: its own, or one made from its spaces.

    Raises:
        ConfigurationError: It is no environment.
    """
    if isinstance(env, EnvContract):
        return env
    contract = getattr(env, "contract", None)
    if isinstance(contract, EnvContract):
        return contract
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space")):
        raise ConfigurationError(
            f"a {type(env).__name__} is no environment to act in: hand in the environment, or what "
            "its endpoint has sent (RemoteVectorEnv.contract)"
        )
    is_vector = isinstance(env, gymnasium.vector.VectorEnv)
    spec = getattr(env, "spec", None)
    spec_id = spec.id if spec is not None else type(env).__name__
    return EnvContract(
        id=spec_id,
        observation_space=from_gymnasium(
            env.single_observation_space if is_vector else env.observation_space
        ),
        action_space=from_gymnasium(env.single_action_space if is_vector else env.action_space),
        num_envs=env.num_envs if is_vector else 1,
        autoreset_mode=AutoresetMode.DISABLED,
    )


__all__ = ["PredictTelemetry", "RemoteModel", "Slots", "contract_of", "shake_hands"]

_JOIN = "/rlmesh.model.v1.ModelService/Join"

DEFAULT_ROUTE = "default"


@dataclass(frozen=True, slots=True)
class Slots:
    """Which lanes and episodes the rows of a batch belong to; every field one entry a row."""

    env_indices: Sequence[int]
    episode_ids: Sequence[str]
    steps: Sequence[int]
    """Steps done in the episode so far."""
    resets: Sequence[bool]
    """Whether the row is the first observation of its episode."""

    def rows(self) -> tuple[PredictSlot, ...]:
        """Return them in the protocol's form.

        Raises:
            ConformanceError: The fields have not as many entries as each other, or one is not what
                its field takes.
        """
        lengths = {field.name: _length(getattr(self, field.name), field) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ConformanceError("structure", "slots", f"{counts}; give one of each for each row")
        lanes, ids, steps, resets = self.env_indices, self.episode_ids, self.steps, self.resets
        if not (_are(int, lanes) and _are(str, ids) and _are(int, steps) and _are(bool, resets)):
            lanes, steps = _counts("env_indices", lanes), _counts("steps", steps)
            ids, resets = _each("episode_ids", ids, str), _each("resets", resets, bool, np.bool_)
        if steps and min(steps) < 0:
            raise ConformanceError("structure", "slots.steps", f"{min(steps)} is below 0")
        return tuple(PredictSlot(*row) for row in zip(lanes, ids, steps, resets, strict=True))


class RemoteModel(NotPicklable):
    """A session with a ModelService.

    Safe to use from several threads: each route's requests are answered in the order in
    which they were sent, different routes do not wait for each other. After an error that the
    endpoint calls not recoverable only ``close`` is left to do.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, with or without ``rlmesh://`` or
            ``tcp://``.
        token: The token that the endpoint requires, or the file that has it (``TokenFile``).
        tls: For an endpoint with TLS.
        connect_timeout_s: For the connection and the handshake.
        predict_timeout_s: How long to wait for any answer.
        edition_text: The edition's text that the endpoint implements, where it is not this
            package's, such as ``"rlmesh-0.1.0b3"``; see ``ConnectOptions``.

    Raises:
        ConfigurationError: ``edition_text`` is not known, or a time is none.
        EndpointError: The endpoint cannot be reached or wants another token.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    def __init__(
        self,
        address: str,
        *,
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
        connect_timeout_s: float = 10.0,
        predict_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        edition_text: str | None = None,
    ) -> None:
        require_seconds("predict_timeout_s", predict_timeout_s)
        self._connect_options = ConnectOptions(address, token, tls, connect_timeout_s, edition_text)
        self._timeout_s = predict_timeout_s
        self._contracts: dict[str, EnvContract] = {}
        self._images: dict[str, ImageRoute] = {}
        self._telemetry: dict[str, PredictTelemetry] = {}
        self._channel = self._connect_options.open()
        try:
            variant, self.answer = handshake(self._connect_options, self._channel)
        except BaseException:
            self._channel.close()
            raise
        given_id = self.answer.capabilities.get(capabilities.SESSION, "")
        own = ((capabilities.SESSION_METADATA_KEY, given_id),) if given_id else ()
        # Every context names its session; rlmesh 0.1.0b3 gives no id and refuses an empty one.
        self._session_id = given_id or uuid.uuid4().hex
        self._dialect = variant.make_dialect(self._session_id)
        self._stream = JoinStream(
            self._channel, _JOIN, self._connect_options.metadata + own, address
        )
        self._session_stream = ModelSessionStream(self._stream, self._dialect, address)

    @property
    def address(self) -> str:
        """Where the endpoint was dialed."""
        return self._connect_options.address

    def configure_route(
        self,
        env: Any,
        *,
        route_id: str = DEFAULT_ROUTE,
        image_codec: str | None = None,
        resize: str | tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    ) -> str:
        """Open a route for one environment.

        Args:
            env: An ``EnvContract``, anything with a ``contract`` (RemoteEnv, RemoteVectorEnv),
                or a gymnasium Env or VectorEnv.
            route_id: Names the route within this session.
            image_codec: Compresses the images of the observations: ``"jpeg:95"`` or another
                quality, ``"webp:80"``, or without loss ``"png"`` or ``"webp"``. Images are uint8
                Boxes from 0 to 255 of shape ``(..., height, width, channels)`` with 1, 3 or 4
                channels; JPEG takes 1 or 3, WebP 3. None: they travel as they are.
            resize: ``(height, width)`` of the images that are sent, of all or by the names of
                leaves, such as ``{"camera": (224, 224)}``; ``"policy"``: images that are larger
                than those of the policy are sent in its size. The policy is asked about a space
                with these sizes.

        Returns:
            ``route_id``.

        Raises:
            ConfigurationError: ``route_id`` is no text; or ``image_codec`` or ``resize`` does not
                fit the observation space, or the endpoint takes no such images.
            RemoteModelError: The policy cannot act there; the message says why.
            EndpointError: The session broke.
        """
        if not isinstance(route_id, str):
            raise ConfigurationError(f"route_id={route_id!r:.40} must be text")
        contract, images = contract_of(env), None
        if image_codec is not None or resize is not None:
            images = ImageRoute(contract, image_codec, resize, self.answer, self.address)
            contract = images.contract
        self._session_stream.ask(
            lambda ids: [self._dialect.configure(ids, route_id, contract)], self._timeout_s
        )
        self._images.pop(route_id, None)
        if images is not None:
            self._images[route_id] = images
        self._contracts[route_id] = contract
        return route_id

    def predict(
        self, observation: Any, *, route_id: str = DEFAULT_ROUTE, slots: Slots | None = None
    ) -> Any:
        """Return one action a row.

        Args:
            observation: A batch, one row a slot, as gymnasium's vector environments give it.
            route_id: A configured route.
            slots: Whose rows these are; default: one row a lane of the route's contract,
                without episode ids: as if no episode ever ended. A recurrent policy needs them
                to begin anew.

        Returns:
            A batch of actions of the route's action space, one row a slot.

        Raises:
            LocalProtocolError: The route was not configured on this client.
            ConformanceError: ``observation`` has the wrong structure or dtype, or ``slots`` are
                not one a row.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        contract = self._contracts.get(route_id)
        if contract is None:
            raise LocalProtocolError(f"route {route_id!r} is not configured; configure_route first")
        if not isinstance(slots, Slots | None):
            problem = f"is a {type(slots).__name__}, expected rlmesh_ray.Slots"
            raise ConformanceError("structure", "slots", problem)
        rows = slots.rows() if slots else _all_lanes(contract.num_envs)
        images = self._images.get(route_id)
        if images is None:
            columns = coerce_batch(contract.observation_space, observation, len(rows))
        else:
            columns = images.columns(observation, len(rows))
        data = self._dialect.encode(contract, columns, len(rows))
        reply = self._session_stream.ask(
            lambda ids: self._dialect.predict(ids, route_id, rows, data), self._timeout_s
        )
        if reply.telemetry is not None:
            self._telemetry[route_id] = reply.telemetry
        actions = self._dialect.actions(contract, reply, len(rows))
        return unflatten(
            contract.action_space,
            [action if isinstance(action, tuple) else action.copy() for action in actions],
        )

    def last_telemetry(self, route_id: str = DEFAULT_ROUTE) -> PredictTelemetry | None:
        """Return how the route's latest prediction was made.

        None before the first one, and when the endpoint reports nothing. Endpoints of rlmesh-ray
        report everything, those of the released rlmesh only the times.
        """
        return self._telemetry.get(route_id)

    def close_route(self, route_id: str = DEFAULT_ROUTE) -> None:
        """Release a route and the state that the policy keeps for it."""
        contract = self._contracts.get(route_id)
        self._session_stream.ask(
            lambda ids: [self._dialect.release(ids, route_id)], self._timeout_s
        )
        # Another thread may have configured it anew already.
        if self._contracts.get(route_id) is contract:
            self._contracts.pop(route_id, None)
            self._images.pop(route_id, None)
            self._telemetry.pop(route_id, None)

    def close(self) -> None:
        """End the session, not the service. Idempotent."""
        self._session_stream.close()
        if self._session_stream.is_own:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _are(kind: type, entries: Sequence[object]) -> bool:
    """Return whether all have exactly that type; fast, since each prediction calls it."""
    return set(map(type, entries)) <= {kind}


def _length(entries: object, field: "Field[Any]") -> int:
    if isinstance(entries, str) or not isinstance(entries, Sized):
        problem = f"is a {type(entries).__name__}, expected a sequence with one entry a row"
        raise ConformanceError("structure", f"slots.{field.name}", problem)
    return len(entries)


def _counts(name: str, entries: Sequence[Any]) -> list[int]:
    """Return the entries as Python's integers, those of NumPy and torch, too.

    Raises:
        ConformanceError: One is none.
    """
    counts = []
    for entry in entries:
        try:
            counts.append(operator.index(entry))
        except TypeError as error:
            raise _misfit(name, entry, int) from error
    return counts


def _each(name: str, entries: Sequence[Any], *kinds: type) -> list[Any]:
    """Return the entries in Python's own types, the first of ``kinds``.

    Raises:
        ConformanceError: One is of none of ``kinds``.
    """
    for entry in entries:
        if not isinstance(entry, kinds):
            raise _misfit(name, entry, kinds[0])
    return [kinds[0](entry) for entry in entries]


def _misfit(name: str, entry: object, wanted: type) -> ConformanceError:
    problem = f"{entry!r:.40} is a {type(entry).__name__}, expected {wanted.__name__}"
    return ConformanceError("structure", f"slots.{name}", problem)


def _all_lanes(num_lanes: int) -> tuple[PredictSlot, ...]:
    return tuple(PredictSlot(lane, "", 0, False) for lane in range(num_lanes))
