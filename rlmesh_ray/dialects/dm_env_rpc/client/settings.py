"""DmEnvRpcSettings: a client's settings for a dm_env_rpc server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.registry import DialectSettings
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.spaces.validation import ValidationMode

Setting = bool | int | float | str | np.generic | NDArray[Any] | Sequence[Any] | Mapping[str, Any]
"""Travels as a tensor: a Python int as int64, a float as double, an array at its own dtype, and a
list of numbers or of text as their array. A mapping is several settings, with a '.' in their
names. Values that no tensor holds unchanged are refused."""

Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class DmEnvRpcSettings(DialectSettings):
    """Settings of a client for a dm_env_rpc server. They are pickled for runners.

    Each lane is an agent on a stream of its own, in a world of its own unless ``one_world`` is set.
    The settings of a server are in the server's documentation.

    Raises:
        ConfigurationError: Two settings exclude each other, or one has a wrong value.
    """

    scheme: ClassVar[str] = "dm_env_rpc://"

    num_envs: int = 1
    """Lanes of a session. With ``batched`` the server decides."""
    create: Settings | Sequence[Settings] | None = field(default_factory=dict)
    """Settings of CreateWorld: for all lanes, or one mapping a lane. None: create no world, join
    ``world_name``."""
    join: Settings | Sequence[Settings] = field(default_factory=dict)
    """Settings of JoinWorld: for all lanes, or one mapping a lane."""
    reset: Settings = field(default_factory=dict)
    """Settings of every reset; those of ``reset(options=...)`` are added."""
    world_name: str = ""
    """The world to join, where none is created."""
    one_world: bool = False
    """Whether all lanes are agents of one world, which the first lane creates, or of
    ``world_name``."""
    batched: bool = False
    """Whether one stream carries all lanes of a world: one message a vector step. Only this
    package's servers offer it."""
    seed: str | None = None
    """The reset setting that takes a lane's seed. None: ``seed`` for this package's servers, and no
    seed for other servers."""
    reward: str = "reward"
    """The observation that is the reward; where there is none, rewards are 0."""
    discount: str = "discount"
    """The observation that is the discount, if there is one; see ``truncate_on_terminated``."""
    observations: tuple[str, ...] | None = None
    """The observations to request, by name; a name includes everything nested in it. None: all but
    the reward, the discount and ``rendering``."""
    actions: tuple[str, ...] | None = None
    """The actions to send, likewise; the server fills in the others. None: all."""
    is_bare: bool = False
    """Whether a single tensor of any name makes a space without a Dict round it. A tensor with the
    name ``observation`` or ``action`` always does."""
    choices_from_zero: bool = False
    """Whether discrete actions are numbered from 0, and not from the server's lowest value: RLlib's
    default modules require that."""
    max_text_length: int = 4096
    """Longest string, since strings have no bounds in dm_env_rpc."""
    truncate_on_terminated: bool = False
    """Whether TERMINATED always is a truncation. With a discount above 0 it is one anyway."""
    time_limit_steps: int | None = None
    """For servers that send TERMINATED at their time limit: it is a truncation in an episode with
    so many steps."""

    asks_contract: bool = True
    """Whether to ask for the exact spaces, which this package's servers publish, on a stream that
    is closed at once. Turn it off for a server that the question breaks."""
    validation: str = "warn"
    """What happens to observations out of their range and to rewards that are not finite:
    ``"warn"`` delivers them, warns once of each kind and counts them, ``"strict"`` ends the
    session, ``"off"`` skips the check. NaN in an observation ends the session in any case."""

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigurationError(f"num_envs={self.num_envs} must be 1 or more")
        if self.max_text_length < 1:
            raise ConfigurationError(f"max_text_length={self.max_text_length} must be 1 or more")
        if self.world_name and self.create is not None:
            raise ConfigurationError(
                f"world_name={self.world_name!r} names a world to join, but create={self.create!r} "
                "makes a new one; give create=None to join it"
            )
        if not isinstance(self.reset, Mapping):
            raise ConfigurationError(f"reset={self.reset!r} must be a mapping")
        for name, chosen in (("observations", self.observations), ("actions", self.actions)):
            if isinstance(chosen, str):
                raise ConfigurationError(f"{name}={chosen!r} must be names, such as ({chosen!r},)")
        if self.batched:
            self._require_whole_worlds()
        if self.time_limit_steps is not None and self.time_limit_steps < 1:
            raise ConfigurationError(
                f"time_limit_steps={self.time_limit_steps} must be 1 or more, or None"
            )
        _ = self.policy  # refuses a wrong value
        for lane in range(self.num_envs):
            _ = self.create_of(lane), self.join_of(lane)

    def _require_whole_worlds(self) -> None:
        if self.num_envs != 1 or self.one_world or self.reshapes:
            raise ConfigurationError(
                "batched=True takes all lanes of a world as they are, and as many as the server "
                "gives it; leave out num_envs, one_world, observations, actions, is_bare and "
                "choices_from_zero"
            )
        is_other = self.truncate_on_terminated or self.time_limit_steps is not None
        if is_other or not self.asks_contract:
            raise ConfigurationError(
                "batched=True is for this package's servers, which publish their contract, and "
                "send truncations; leave out truncate_on_terminated, time_limit_steps and "
                "asks_contract"
            )

    @property
    def policy(self) -> ValidationMode:
        """``validation`` as a mode."""
        return ValidationMode.from_option(self.validation)

    @property
    def reshapes(self) -> bool:
        """Whether the spaces differ from those that the server publishes."""
        return (
            self.is_bare
            or self.choices_from_zero
            or self.actions is not None
            or self.observations is not None
        )

    def of_one_lane(self) -> Self:
        """Return the settings for lane 0 alone."""
        return replace(
            self,
            num_envs=1,
            create=self.create_of(0),
            join=self._of_lane("join", self.join, 0),
        )

    def create_of(self, lane: int) -> Settings | None:
        """Return the settings of a lane's CreateWorld; None: it creates no world."""
        return None if self.create is None else self._of_lane("create", self.create, lane)

    def join_of(self, lane: int) -> Settings:
        """Return the settings of a lane's JoinWorld."""
        batched: Settings = {"batched": True} if self.batched else {}
        return {**self._of_lane("join", self.join, lane), **batched}

    def _of_lane(self, name: str, value: Settings | Sequence[Settings], lane: int) -> Settings:
        if isinstance(value, Mapping):
            return value
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or len(value) != self.num_envs or not isinstance(value[lane], Mapping):
            raise ConfigurationError(
                f"{name}={value!r} must be a mapping, or {self.num_envs} of them, one a lane"
            )
        return value[lane]
