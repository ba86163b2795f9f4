"""One session's lanes with the autoreset mode that RLlib expects: NEXT_STEP.

RLlib assumes NEXT_STEP without checking: in the step after an episode's end it ignores the
lane's action and takes the observation as the first of a new episode. Here NEXT_STEP is emulated
for endpoints with another mode, by partial resets:

* DISABLED, every lane ended (always so with one lane): a Reset instead of the Step.
* DISABLED, some lanes ended: they are reset before the Step, since stepping an ended lane is
  not allowed, and again after it, since the Step has moved them on.
* SAME_STEP: the last observation of the episode is in the infos. The lane has been restarted
  already and stepped with an action for the former episode, so it is reset again.

A step whose reward is not finite fails, since it must not reach a learner: the episode ends before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.env.env_client import ResetResult, StepResult
from rlmesh_ray.client.env.env_session_client import EnvSessionClient
from rlmesh_ray.errors import RemoteEnvError, RemoteProtocolError
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.spaces.batch import Column, flatten, replace_lanes
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.vector_infos import lane_info


class NoInfos(Sequence[dict[str, Any]]):
    """The infos of lanes that have none: each access returns a new empty dict.

    One stored dict for each lane and step, most of them never read, would keep the garbage
    collector busy.

    Args:
        num_lanes: Number of lanes of the vector.
    """

    __slots__ = ("_num_lanes",)

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes

    def __len__(self) -> int:
        return self._num_lanes

    def __getitem__(self, lane: Any) -> Any:
        if not -self._num_lanes <= lane < self._num_lanes:
            raise IndexError(f"lane {lane} of {self._num_lanes}")
        return {}


def lane_infos(infos: Mapping[str, object], num_lanes: int) -> Sequence[dict[str, Any]]:
    """Return the ``lane_info`` of each lane, at less cost where there are many.

    Args:
        infos: Infos in the form of gymnasium's vector environments.
        num_lanes: Number of lanes of the vector.

    Returns:
        One dict for each lane, shared with no other lane.
    """
    if not infos:
        return NoInfos(num_lanes)
    if all(_is_usual(infos, key, num_lanes) for key in infos):
        return _taken_apart(infos, num_lanes)
    return [lane_info(infos, lane) for lane in range(num_lanes)]


def joined(parts: Sequence[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    if all(isinstance(part, NoInfos) for part in parts):
        return NoInfos(sum(map(len, parts)))
    return [info for part in parts for info in part]


def _is_usual(infos: Mapping[str, object], key: str, num_lanes: int) -> bool:
    """Return whether a key holds an array with one entry a lane, or is the mask of such a key."""
    if key.startswith("_"):
        return key[1:] in infos and f"_{key}" not in infos and not key.startswith("__")
    value, mask = infos[key], infos.get(f"_{key}")
    return (
        type(value) is np.ndarray
        and type(mask) is np.ndarray
        and mask.dtype == np.bool_
        and value.shape[:1] == mask.shape == (num_lanes,)
    )


def _taken_apart(infos: Mapping[str, Any], num_lanes: int) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = [{} for _ in range(num_lanes)]
    for key, value in infos.items():
        if key.startswith("_"):
            continue
        # Python's scalars, as from lane_info; NumPy's own where an array holds objects.
        is_plain = value.ndim == 1 and value.dtype != object
        entries = value.tolist() if is_plain else list(map(_entry, value))
        for lane in np.flatnonzero(infos[f"_{key}"]).tolist():
            own[lane][key] = entries[lane]
    return own


def _entry(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


@dataclass(slots=True)
class SessionBatch:
    """The result of a step or reset in all lanes of a session or group; one entry for each lane.

    A session gives columns and arrays. Its group makes of them, in place, what a sampling path
    takes: observations in the form of gymnasium's vector environments; or, with several agents,
    lists of dicts by agent. Observations own their memory: RLlib's episodes keep views of them.
    """

    observation: Any
    rewards: Any
    terminated: Any
    truncated: Any
    infos: Sequence[dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Ids of the requests in flight, in the order in which they are answered."""

    before: str = ""
    step: str = ""
    after: str = ""
    restarted: tuple[int, ...] = ()


class NextStepSession:
    """The lanes of one session, in NEXT_STEP mode for any mode of the endpoint.

    Args:
        client: The client of an open session; ``close`` closes it.
    """

    def __init__(self, client: EnvSessionClient) -> None:
        self._client = client
        self._mode = client.contract.autoreset_mode
        self._ended: tuple[int, ...] = ()
        self._pending = _Pending()

    @property
    def num_lanes(self) -> int:
        return self._client.contract.num_envs

    def reset(self, seeds: Sequence[int]) -> SessionBatch:
        """Start new episodes everywhere.

        Args:
            seeds: Empty, or one for each lane.
        """
        self._ended = ()
        return self._first(self._client.reset(seeds=seeds))

    def send(self, action: Sequence[Column]) -> None:
        ended, self._ended = self._ended, ()
        if not ended:
            self._pending = _Pending(step=self._client.send_step(action))
        elif self._mode is AutoresetMode.DISABLED and len(ended) == self.num_lanes:
            self._pending = _Pending(after=self._client.send_reset())
        else:
            needs_reset = self._mode is AutoresetMode.DISABLED
            before = self._client.send_reset(lanes=ended) if needs_reset else ""
            step = self._client.send_step(action, is_last=False)
            after = self._client.send_reset(lanes=ended)
            self._pending = _Pending(before, step, after, ended)

    def receive(self) -> SessionBatch:
        """Return the result of the actions that were sent.

        Raises:
            RemoteEnvError: The environment raised or timed out, or gave a reward that is not
                finite. The session can only be closed then.
            EndpointError: The session broke.
        """
        pending, self._pending = self._pending, _Pending()
        if not pending.step:
            return self._first(self._client.receive_reset(pending.after))
        if pending.before:
            self._client.receive_reset(pending.before)
        batch = self._next(self._client.receive_step(pending.step), pending.restarted)
        if pending.after:
            fresh = self._first(self._client.receive_reset(pending.after))
            infos = list(batch.infos)
            for lane in pending.restarted:
                infos[lane] = fresh.infos[lane]
            batch.observation = replace_lanes(
                batch.observation, fresh.observation, pending.restarted
            )
            batch.infos = infos
        return batch

    def wakeup(self) -> WakeupDescriptors | None:
        return None if self._pending.after else self._client.wakeup()

    def call(self, name: str, arguments: Sequence[object]) -> tuple[Any, ...]:
        return self._client.call(name, *arguments)

    def close(self) -> None:
        self._client.close()

    def _first(self, result: ResetResult) -> SessionBatch:
        return SessionBatch(
            result.observation,
            np.zeros(self.num_lanes),
            np.zeros(self.num_lanes, np.bool_),
            np.zeros(self.num_lanes, np.bool_),
            lane_infos(result.infos, self.num_lanes),
        )

    def _next(self, result: StepResult, restarted: tuple[int, ...]) -> SessionBatch:
        if restarted:
            for array in (result.rewards, result.terminated, result.truncated):
                array[list(restarted)] = 0
        infos = lane_infos(result.infos, self.num_lanes)
        observation = result.observation
        _require_finite(result.rewards)
        if self._mode is not AutoresetMode.NEXT_STEP:
            has_ended = result.terminated | result.truncated
            self._ended = tuple(np.flatnonzero(has_ended).tolist())
            if self._mode is AutoresetMode.SAME_STEP:
                infos = list(infos)
                observation = self._with_final_observations(observation, infos)
        return SessionBatch(observation, result.rewards, result.terminated, result.truncated, infos)

    def _with_final_observations(
        self, observation: list[Column], infos: list[dict[str, Any]]
    ) -> list[Column]:
        for lane in self._ended:
            if "final_obs" not in infos[lane]:
                raise RemoteProtocolError(
                    f"lane {lane} ended under autoreset mode SAME_STEP, but its infos hold no "
                    "final_obs; host the environment with another autoreset mode"
                )
            parts = flatten(self._client.contract.observation_space, infos[lane].pop("final_obs"))
            rows = [
                (part,) * self.num_lanes if isinstance(part, str) else _row(part, self.num_lanes)
                for part in parts
            ]
            observation = replace_lanes(observation, rows, (lane,))
            infos[lane] = dict(infos[lane].pop("final_info", {}))
        return observation


def _require_finite(rewards: NDArray[np.float64]) -> None:
    is_finite = np.isfinite(rewards)
    if np.count_nonzero(is_finite) != len(rewards):
        lane = int(np.argmin(is_finite))
        raise RemoteEnvError(
            "INTERNAL",
            f"the environment gave {rewards[lane]} as a reward in lane {lane} of its session "
            '(serve it with on_bad_value="truncate" to end that lane\'s episode alone)',
            is_recoverable=False,
        )


def _row(part: Any, num_lanes: int) -> NDArray[Any]:
    array = np.asarray(part)
    return np.broadcast_to(array, (num_lanes, *array.shape))
