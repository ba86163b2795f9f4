"""RemoteEnv and RemoteVectorEnv: the lanes of an endpoint as gymnasium environments.

``same_step`` is for trainers without autoreset modes: a step with the resets of ended lanes.
"""

import io
import math
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from PIL import Image

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import ResetResult
from rlmesh_ray.client.env.env_session_client import (
    ClientOptions,
    EnvSessionClient,
    open_client_session,
)
from rlmesh_ray.client.fork_guard import NotPicklable
from rlmesh_ray.errors import (
    ConfigurationError,
    ConfigurationWarning,
    ConformanceError,
    ContractMismatchError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.options import as_reset_options, as_seed, takes_options
from rlmesh_ray.protocol.capabilities import MULTI_AGENT, NDARRAY, PARTIAL_RESET, SET_ATTR
from rlmesh_ray.spaces.batch import Column, coerce, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import env_spec, to_gymnasium
from rlmesh_ray.spaces.multi_agent import agents_from_metadata
from rlmesh_ray.spaces.validation import WARNING_KEY, coerce_batch, structure_checker
from rlmesh_ray.spaces.vector_infos import LEFT_OUT_KEY, lane_info, merged_infos, with_arrays
from rlmesh_ray.transport.direct_connection import Pictures
from rlmesh_ray.wire.lane_calls_v1 import LaneCall, pack_call

_MOST_NAMES = 8
_STEP_IS_PENDING = "a step is pending: step_wait() first"
_REMEDY = (
    "use RLlib's multi-agent runner: rlmesh_ray.rllib.configure(config, ADDRESS), with policies "
    "and their mapping in config.multi_agent(...); docs/how_to/several_agents.md says what takes "
    "several agents"
)


def _refuse_generator(_env: object, _value: object = None) -> NoReturn:
    """Raise AttributeError: the generator is at the endpoint, and ``reset`` seeds it there."""
    raise AttributeError(
        "np_random is the random generator of an environment, and that runs at its endpoint: "
        "reset(seed=...) seeds it there, and a wrapper that draws from it wraps the environment "
        "that is served"
    )


class RemoteSession(NotPicklable):
    """The open session of a RemoteEnv or a RemoteVectorEnv."""

    _client: EnvSessionClient

    @property
    def contract(self) -> EnvContract:
        """What the endpoint promised."""
        return self._client.contract

    @property
    def address(self) -> str:
        """Where the endpoint is."""
        return self._client.address

    np_random = property(_refuse_generator, _refuse_generator)
    """Raises AttributeError with the reason, also where it is set."""


def agents_notice(contract: EnvContract) -> str:
    """Return that a lane holds several agents, and which, as a sentence; empty: it holds one."""
    agents = agents_from_metadata(contract.metadata.get(MULTI_AGENT))
    if not agents:
        return ""
    return f"each lane of {contract.id} holds several agents ({_listed(agents)}); {_REMEDY}"


def _listed(values: Iterable[object]) -> str:
    names = [repr(one) for one in values]
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def action_error(error: ConformanceError, contract: EnvContract) -> ConformanceError:
    """Return the error as one about an action; it names the agents that act, if there are any."""
    agents = agents_notice(contract)
    if not agents:
        return error.about("action")
    keys = _listed(agents_from_metadata(contract.metadata.get(MULTI_AGENT)).values())
    reason = (
        f"{error.reason}; the action of a lane is a dict with an entry for each agent, under the "
        f"keys {keys}: {agents}"
    )
    return ConformanceError(error.kind, error.path, reason, error.lane, "action")


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))


def render_lanes(client: EnvSessionClient) -> Pictures | None:
    """Return one picture per lane, (height, width, 3) uint8; None if the render mode gives none.

    Raises:
        LocalProtocolError: The lanes have no picture yet.
        ConfigurationError: The render mode returns something other than pictures.
    """
    rendered, contract = client.render(), client.contract
    if isinstance(rendered, bytes):
        picture = decode_png(rendered)
        if NDARRAY in client.answer.capabilities:
            return tiles(picture, contract.num_envs)
        return (picture,) * contract.num_envs
    if rendered is not None:
        return rendered
    if contract.render_mode == "rgb_array":
        raise LocalProtocolError(
            f"{client.address} has no picture: reset() before render(); if it was reset, the "
            "render() of its environment returned None"
        )
    if contract.render_mode not in ("", "human"):
        raise ConfigurationError(
            f"{client.address} has render mode {contract.render_mode!r}, and only pictures travel; "
            "serve the environment with render_mode='rgb_array'"
        )
    return None


def tiles(picture: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], ...]:
    """Split a picture, tiled row by row by ``envs.vector_host``, into the frames of the lanes."""
    num_columns = math.ceil(math.sqrt(count))
    height = picture.shape[0] // math.ceil(count / num_columns)
    width = picture.shape[1] // num_columns
    corners = (divmod(lane, num_columns) for lane in range(count))
    return tuple(
        picture[row * height : (row + 1) * height, column * width : (column + 1) * width].copy()
        for row, column in corners
    )


@takes_options(ClientOptions)
class RemoteEnv(RemoteSession, gymnasium.Env[Any, Any]):
    """The lane of one session with an endpoint whose width is 1.

    To be used by one thread at a time, in the process that has opened it.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, with or without ``rlmesh://`` or ``tcp://``;
            ``dm_env_rpc://HOST:PORT``, for a server of that protocol; or a ``ConnectOptions``,
            which also has how long the connection may take, and another edition text.
        **options: Those of ``ClientOptions``.

    Raises:
        ConfigurationError: ``edition_text`` is not known, or ``image_codec`` or ``resize`` does not
            fit the environment, the endpoint or the ``transport``.
        ContractMismatchError: The endpoint has more than one lane.
        EndpointError: The endpoint cannot be reached, requires another token, or is full.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    def __init__(self, address: str | ConnectOptions, **options: Unpack[ClientOptions]) -> None:
        self._client = open_client_session("RemoteEnv", address, options)

        def connect_again(render_mode: str | None = None) -> RemoteEnv:
            """Open another session: what ``spec.make()`` and gymnasium's checker ask for."""
            env = RemoteEnv(address, **options)
            if render_mode not in (None, env.render_mode):
                warnings.warn(
                    f"{env.address} serves render_mode={env.render_mode!r}, not {render_mode!r}: a "
                    "client cannot choose it",
                    ConfigurationWarning,
                    stacklevel=2,
                )
            return env

        contract = self._client.contract
        if contract.num_envs != 1:
            self._client.close()
            raise ContractMismatchError(
                f"{self.address} serves {contract.num_envs} lanes; use RemoteVectorEnv"
            )
        self.metadata = dict(contract.metadata)
        self.spec = env_spec(contract, connect_again)
        self.render_mode = contract.render_mode or None
        self._observation_spec = contract.observation_space
        self._action_spec = contract.action_space
        self.observation_space = to_gymnasium(contract.observation_space)
        self.action_space = to_gymnasium(contract.action_space)
        self._action_leaves = leaves(contract.action_space)
        self._action_checker = structure_checker(contract.action_space)

    @property
    def np_random_seed(self) -> int:
        """The seed that the last ``reset`` with one has sent; see ``RemoteVectorEnv``."""
        return -1 if self._np_random_seed is None else self._np_random_seed

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether this client, the environment or one of its wrappers has an attribute.

        Raises:
            ConfigurationError: The client has not, and the operator of the endpoint does not allow
                the call ``has_wrapper_attr``.
        """
        return hasattr(self, name) or bool(self.call("has_wrapper_attr", name))

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this client; ``call`` reads those of the environment.

        Raises:
            AttributeError: The client has no such attribute.
        """
        if hasattr(self, name) or hasattr(type(self), name):  # np_random says why there is none
            return getattr(self, name)
        raise AttributeError(
            f"RemoteEnv has no attribute {name!r}; if the environment at {self.address} has it, "
            f"call({name!r}) reads or calls it there"
        )

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of this client if it has one of that name, else of the environment.

        Raises:
            ConfigurationError: The operator of the endpoint does not allow the call
                ``set_wrapper_attr``, or ``has_wrapper_attr``, which ``force=False`` needs.
        """
        if hasattr(self, name) or hasattr(type(self), name):
            setattr(self, name, value)
            return True
        return (force or self.has_wrapper_attr(name)) and bool(
            self.call("set_wrapper_attr", name, value)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; see ``gymnasium.Env.reset``, and ``EnvClient.reset`` for options.

        Raises:
            CodecError: An option cannot travel; the message names it, and nothing was sent.
            ConfigurationError: ``seed`` is not an integer of 0 or more, or ``options`` is not a
                mapping; nothing was sent.
            RemoteEnvError: The environment raised or timed out; another reset may follow.
            EndpointError: The session broke.
        """
        seeds = () if seed is None else (as_seed(seed),)
        own_options = as_reset_options(options)
        try:
            result = self._client.reset(seeds=seeds, options=own_options)
        except RemoteEnvError:
            self._np_random_seed = None
            raise
        super().reset(seed=seed)  # gymnasium's checker looks at the private generator
        return self._lane_value(result.observation), lane_info(result.infos, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply ``action``; see ``gymnasium.Env.step``.

        Raises:
            ConformanceError: ``action`` has the wrong structure or dtype, NaN, or an element
                outside the domain of its Discrete, MultiDiscrete or MultiBinary; nothing was sent,
                and the session goes on. A Box's bounds are the endpoint's affair
                (``validation``).
            RemoteEnvError: The environment raised or timed out, or the endpoint refused the action;
                where the error ``is_recoverable``, a reset may follow.
            EndpointError: The session broke.
        """
        try:
            parts = zip(self._action_leaves, flatten(self._action_spec, action), strict=True)
            own = [coerce(leaf, part, None) for leaf, part in parts]
            columns: list[Column] = [
                (part,) if isinstance(part, str) else np.asarray(part)[np.newaxis] for part in own
            ]
            # The endpoint would end the session for it.
            self._action_checker.check(columns)
        except ConformanceError as error:
            raise action_error(error, self.contract) from error.__cause__
        try:
            result = self._client.step(columns)
        except RemoteEnvError:
            self._np_random_seed = None  # it may have ended the environment that got the seed
            raise
        return (
            self._lane_value(result.observation),
            float(result.rewards[0]),
            bool(result.terminated[0]),
            bool(result.truncated[0]),
            lane_info(result.infos, 0),
        )

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the environment; see ``EnvClient.call``.

        Args:
            name: One that the operator of the endpoint allows.
            args: By position.
        """
        return self._client.call(name, *args)[0]

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]  # pictures only
        """Return a picture, (height, width, 3) uint8; see ``RemoteVectorEnv.render``."""
        pictures = render_lanes(self._client)
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _lane_value(self, columns: list[Column]) -> Any:
        return unflatten(self._observation_spec, [column[0] for column in columns])


@takes_options(ClientOptions)
class RemoteVectorEnv(RemoteSession, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The lanes of one session with an endpoint.

    Spaces, width, render mode and autoreset mode are the endpoint's
    (``autoreset_mode``), with one exception: a single lane that does not reset itself,
    as endpoints have it, does so here on the step after an episode's end (``NEXT_STEP``), like
    gymnasium's own vectors of one. Arrays that are returned belong to the caller. To be used by one
    thread at a time, in the process that has opened it.

    Args:
        address: See ``RemoteEnv``.
        **options: Those of ``ClientOptions``.

    Raises:
        RlmeshError: As ``RemoteEnv``, except ContractMismatchError.
    """

    # gymnasium closes what is not closed, also where nothing was opened.
    closed = True

    def __init__(self, address: str | ConnectOptions, **options: Unpack[ClientOptions]) -> None:
        self._client = open_client_session("RemoteVectorEnv", address, options)
        self.closed = False
        contract = self._client.contract
        self.num_envs = contract.num_envs
        mode = contract.autoreset_mode
        self._resets_here = self.num_envs == 1 and mode is AutoresetMode.DISABLED
        if self._resets_here:
            mode = AutoresetMode.NEXT_STEP
        # Where gymnasium's own vectors have it, too: TorchRL asks for the attribute.
        self.autoreset_mode = gymnasium.vector.AutoresetMode(mode.value)
        self.metadata = {**contract.metadata, "autoreset_mode": self.autoreset_mode}
        self.spec = env_spec(contract)
        self.render_mode = contract.render_mode or None
        self._observation_spec = contract.observation_space
        self._action_spec = contract.action_space
        self.single_observation_space = to_gymnasium(contract.observation_space)
        self.single_action_space = to_gymnasium(contract.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._action_checker = structure_checker(contract.action_space)
        self._pending_step = ""
        # Where the lane is reset here: whether it has ended, and whether its reset is pending.
        self._has_ended = self._is_resetting = False
        # Whether the hosted vector ignores masks and resets all lanes, as an error has shown.
        self._ignores_masks = False
        # Lanes that have been reset, and no error has come since that may have ended them.
        self._begun: set[int] = set()
        self._sent_seeds: dict[int, int] = {}

    @property
    def resets_single_lanes(self) -> bool:
        """Whether a ``reset_mask`` may choose some of the lanes."""
        return self.num_envs == 1 or PARTIAL_RESET in self._client.answer.capabilities

    @property
    def has_begun(self) -> bool:
        """Whether all lanes were reset since the start and since errors: now single ones can be."""
        return len(self._begun) == self.num_envs

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as SyncVectorEnv
        """The seed that the last ``reset`` with one has sent to each lane.

        -1 where that is not known, as in gymnasium: no seed was sent, or an error may have ended
        the environment that got it.
        """
        return tuple(self._sent_seeds.get(lane, -1) for lane in range(self.num_envs))

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: None; an integer for the first lane (lane i gets ``seed + i``); or one entry per
                lane, where None lets a lane keep its random generator. A request has seeds for all
                of its lanes or for none, so lanes with seeds and lanes without are reset in
                separate requests. Where that is not possible (on the first reset, after an error,
                and at endpoints that can only reset all lanes, such as one whose hosted vector
                ignores ``options["reset_mask"]``), a lane without a seed gets a random one.
            options: Handed to the environment; see ``EnvClient.reset``. ``{"reset_mask": mask}``
                (num_envs,) bool resets only those lanes, as in gymnasium; seeds still count all
                lanes. A hosted vector that ignores ``options["reset_mask"]`` fails.

        Returns:
            Batched observations over all lanes, and infos.

        Raises:
            CodecError: An option cannot travel; the message names it, and nothing was sent.
            ConformanceError: The mask is not (num_envs,) bool or chooses no lane; nothing was sent.
            ConfigurationError: A seed is not an integer of 0 or more, there are more or fewer seeds
                than lanes, or ``options`` is not a mapping; nothing was sent.
            LocalProtocolError: A step is pending; nothing was sent.
            RemoteEnvError: The environment raised or timed out; another reset may follow.
            EndpointError: The session broke.
        """
        if self._pending_step:
            raise LocalProtocolError(_STEP_IS_PENDING)
        rest = as_reset_options(options)
        mask = rest.pop("reset_mask", None)
        seeds = self._seeds(seed)
        lanes: list[int] = []
        if mask is not None:
            lanes = _chosen_lanes(mask, self.num_envs)
            seeds = [seeds[lane] for lane in lanes] if seeds else []
        try:
            result, infos = self._reset(seeds, rest, lanes)
        except RemoteEnvError:
            self._note_error()
            raise
        self._begun.update(lanes or range(self.num_envs))
        self._has_ended = False
        observation = unflatten(self._observation_spec, result.observation)
        return observation, self._infos(infos, lanes)

    def _reset(
        self, seeds: list[int | None], options: dict[str, Any], lanes: list[int]
    ) -> tuple[ResetResult, dict[str, Any]]:
        """Reset ``lanes`` (empty: all), with a seed or None for each of them, or no seeds."""
        given = [seed for seed in seeds if seed is not None]
        if 0 < len(given) < len(seeds):
            can_be_apart = self.resets_single_lanes and (bool(lanes) or not self._ignores_masks)
            if self.has_begun and can_be_apart:
                try:
                    return self._reset_apart(seeds, options, lanes or range(self.num_envs))
                except RemoteEnvError as error:
                    # All lanes are meant, and the hosted vector has reset them all.
                    if lanes or "reset_mask" not in error.message:
                        raise
                    self._ignores_masks = True
            # As good as those that an environment draws for itself, of 31 bits.
            given = [secrets.randbelow(2**31) if seed is None else seed for seed in seeds]
        result = self._client.reset(seeds=given, options=options, lanes=lanes)
        self._sent_seeds.update(zip(lanes or range(self.num_envs), given, strict=False))
        return result, dict(result.infos)

    def _reset_apart(
        self, seeds: list[int | None], options: dict[str, Any], lanes: Sequence[int]
    ) -> tuple[ResetResult, dict[str, Any]]:
        """Reset those of ``lanes`` that have a seed, then those without."""
        by_lane = dict(zip(lanes, seeds, strict=True))
        seeded = {lane: seed for lane, seed in by_lane.items() if seed is not None}
        unseeded = [lane for lane in lanes if lane not in seeded]
        first = self._client.reset(seeds=list(seeded.values()), options=options, lanes=list(seeded))
        self._sent_seeds.update(seeded)
        result = self._client.reset(options=options, lanes=unseeded)
        return result, merged_infos(first.infos, result.infos)

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Apply one action to each lane.

        Args:
            actions: A batch of ``action_space``.

        Returns:
            Batched observations, rewards (num_envs,) float64, terminations and truncations
            (num_envs,) bool, infos.

        Raises:
            RlmeshError: As ``RemoteEnv.step``.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the actions; ``step_wait`` returns the result.

        Raises:
            ConformanceError: See ``step``; nothing was sent.
            LocalProtocolError: A step is pending already; nothing was sent.
        """
        if self._pending_step:
            raise LocalProtocolError(_STEP_IS_PENDING)
        try:
            columns = coerce_batch(self._action_spec, actions, self.num_envs)
            # The endpoint would end the session for it.
            self._action_checker.check(columns)
        except ConformanceError as error:
            raise action_error(error, self.contract) from error.__cause__
        self._is_resetting, self._has_ended = self._has_ended, False
        if self._is_resetting:
            self._pending_step = self._client.send_reset()
        else:
            self._pending_step = self._client.send_step(columns)

    def step_wait(
        self,
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Wait for the step that ``step_async`` sent.

        Raises:
            LocalProtocolError: No step is pending.
        """
        pending, self._pending_step = self._pending_step, ""
        if not pending:
            raise LocalProtocolError("step_wait() without step_async()")
        try:
            if self._is_resetting:  # a reset is the step of a lane that resets itself
                first = self._client.receive_reset(pending)
                observation = unflatten(self._observation_spec, first.observation)
                no = np.zeros(1, np.bool_)
                return observation, np.zeros(1), no, no.copy(), self._infos(first.infos)
            result = self._client.receive_step(pending)
        except RemoteEnvError:
            self._note_error()
            raise
        self._has_ended = self._resets_here and bool(result.terminated[0] or result.truncated[0])
        return (
            unflatten(self._observation_spec, result.observation),
            result.rewards,
            result.terminated,
            result.truncated,
            self._infos(result.infos),
        )

    def call(self, name: str, *args: Any, lanes: Sequence[int] = ()) -> tuple[Any, ...]:
        """Call a method of every lane's environment; see ``EnvClient.call``.

        Args:
            name: One that the operator of the endpoint allows.
            args: By position.
            lanes: Indices, each once; empty for all.

        Returns:
            For each lane, what the method returned, or the attribute's value if it is not a method.
        """
        return self._client.call(name, *args, lanes=lanes)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every lane's environment; as in gymnasium, methods are called."""
        return self._client.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of every lane's environment, by ``gymnasium.Env.set_wrapper_attr``.

        Args:
            name: Any attribute, of the environment or of one of its wrappers.
            values: A list or tuple has one value for each lane; anything else is the value of all
                lanes.

        Raises:
            CodecError: A value cannot travel; no lane was changed.
            ConfigurationError: The operator of the endpoint does not allow the call
                ``set_wrapper_attr``, or there are more or fewer values than lanes; no lane was
                changed.
            RemoteEnvError: An environment raised; lanes before it have been changed.
        """
        if not isinstance(values, list | tuple):
            self._client.call(SET_ATTR, name, values)
            return
        if len(values) != self.num_envs:
            raise ConfigurationError(
                f"set_attr: {name} has {len(values)} values; give one per lane ({self.num_envs}), "
                "or a single value, not a list or tuple, for all of them"
            )
        for value in values:  # an error of the last one must not come after the others were set
            pack_call(LaneCall(SET_ATTR, (name, value)))
        for lane, value in enumerate(values):
            self._client.call(SET_ATTR, name, value, lanes=[lane])

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # type: ignore[override]  # a TypeVar
        """Return one picture per lane, ``(height, width, 3) uint8``.

        None where gymnasium's environments return none either: the render mode is None or human.
        Endpoints of other implementations may send one picture for all lanes; each gets that.

        Raises:
            LocalProtocolError: The lanes have no picture yet.
            ConfigurationError: The render mode returns something other than pictures.
        """
        return render_lanes(self._client)

    def close_extras(self, **_kwargs: Any) -> None:
        """End the session; ``close`` calls this."""
        self._pending_step = ""
        self._client.close()

    def _note_error(self) -> None:
        # The episodes may have ended, and the environments with them.
        self._begun.clear()
        self._sent_seeds.clear()

    def _infos(self, infos: Mapping[str, Any], lanes: Sequence[int] = ()) -> dict[str, Any]:
        """Return the infos of a response about ``lanes`` (empty: all) as gymnasium's vectors do."""
        # What an endpoint gives once for the whole response belongs to each of these lanes.
        own = lanes or range(self.num_envs)
        return with_arrays(infos, (WARNING_KEY, LEFT_OUT_KEY), own, self.num_envs)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return []
        if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str):
            seeds = [None if one is None else as_seed(one) for one in seed]
            if len(seeds) not in (0, self.num_envs):
                raise ConfigurationError(
                    f"seed has {len(seeds)} entries; give one per lane ({self.num_envs})"
                )
            return seeds
        first = as_seed(seed)
        return [first + lane for lane in range(self.num_envs)]


def _chosen_lanes(mask: Any, num_envs: int) -> list[int]:
    flags = np.asarray(mask)
    if flags.shape != (num_envs,) or flags.dtype != np.bool_ or not flags.any():
        raise ConformanceError(
            "structure", "reset_mask", f"must be {num_envs} booleans, at least one of them True"
        )
    return np.flatnonzero(flags).tolist()


@dataclass(frozen=True, slots=True)
class SameStepResult:
    """A step of all lanes, and the resets of those whose episode it has ended."""

    observations: Any
    """Batched; for lanes that have ended, the first observation of the next episode."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: list[dict[str, Any]]
    """The infos of the step, by lane."""
    final_observations: dict[int, Any]
    """The last observations of lanes that have ended."""
    reset_infos: dict[int, dict[str, Any]]
    """The infos of the resets of lanes that have ended."""


def require_same_step(env: RemoteVectorEnv) -> None:
    """Make sure that ``same_step`` can reset the lanes of ``env`` one by one, where it must."""
    if agents := agents_notice(env.contract):
        raise ConfigurationError(f"{env.address} cannot be used like this: {agents}")
    if env.contract.autoreset_mode is not AutoresetMode.SAME_STEP and not env.resets_single_lanes:
        raise ConfigurationError(
            f"{env.address} resets all of its {env.num_envs} lanes or none, but each must be "
            "reset when its own episode ends; serve the environment with rlmesh-ray serve-env "
            "--autoreset disabled, or have the endpoint serve 1 lane"
        )


def same_step(env: RemoteVectorEnv) -> SameStepResult:
    """Wait for the step that ``env.step_async`` sent, and reset the lanes that it has ended.

    The result does not depend on the autoreset mode of the endpoint: lanes that would reset
    themselves on the next step are reset before it.

    Raises:
        RemoteProtocolError: The endpoint's mode is SAME_STEP, and it does not send the last
            observation of an episode.
    """
    observations, rewards, terminated, truncated, shared = env.step_wait()
    infos = [lane_info(shared, lane) for lane in range(env.num_envs)]
    has_ended = terminated | truncated
    ended = np.flatnonzero(has_ended).tolist()
    last: dict[int, Any] = {}
    firsts: dict[int, dict[str, Any]] = {}
    if ended and env.contract.autoreset_mode is AutoresetMode.SAME_STEP:
        firsts = {lane: infos[lane] for lane in ended}
        last = {lane: _last_observation(env, firsts[lane], lane) for lane in ended}
        for lane in ended:
            infos[lane] = dict(firsts[lane].pop("final_info", {}))
    elif ended:
        spec = env.contract.observation_space
        columns = flatten(spec, observations)
        last = {lane: unflatten(spec, [column[lane] for column in columns]) for lane in ended}
        observations, shared = env.reset(options={"reset_mask": has_ended})
        firsts = {lane: lane_info(shared, lane) for lane in ended}
    return SameStepResult(observations, rewards, terminated, truncated, infos, last, firsts)


def _last_observation(env: RemoteVectorEnv, info: dict[str, Any], lane: int) -> Any:
    if "final_obs" not in info:
        raise RemoteProtocolError(
            f"{env.address}: lane {lane} ended under autoreset mode SAME_STEP, but its infos hold "
            "no final_obs; host the environment with another autoreset mode"
        )
    spec = env.contract.observation_space
    parts = flatten(spec, info.pop("final_obs"))
    own = zip(leaves(spec), parts, strict=True)
    return unflatten(spec, [coerce(leaf, part, None) for leaf, part in own])
