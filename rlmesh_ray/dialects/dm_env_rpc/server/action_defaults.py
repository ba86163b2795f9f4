"""Default actions, for actions that an agent does not send and for slots that do not act."""

from collections.abc import Mapping
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.server.agent_slots import AgentSlot, Row
from rlmesh_ray.dialects.dm_env_rpc.server.settings import MissingActions
from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.spaces.multi_agent import filler_of_leaf


class SlotActions:
    """Completes the actions of the agent in a slot.

    Args:
        contract: The environment's.
        slot: The agent's.
        missing: How missing actions are replaced.
    """

    def __init__(self, contract: EnvContract, slot: AgentSlot, missing: MissingActions) -> None:
        self._tensors = slot.tensors
        own_leaves = leaves(contract.action_space)
        self._fillers: dict[int, Any] = {}
        for action in slot.tensors.actions:
            filler = filler_of_leaf(own_leaves[action.position])
            is_text = action.dtype is None
            many = [filler] * contract.num_envs if is_text else filler
            self._fillers[action.position] = many if slot.is_batched else filler
        self._names = {action.position: action.spec.name for action in slot.tensors.actions}
        self._missing = missing
        self._held = self._fillers

    def begin(self) -> None:
        """Forget the actions of the last step, as a sequence begins."""
        self._held = self._fillers

    def complete(self, sent: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all actions, by leaf.

        Args:
            sent: ``pb.Tensor`` by uid.

        Raises:
            CodecError: One is malformed, or is missing where ``missing`` is ERROR.
        """
        values = self._tensors.read_actions(sent)
        if len(values) < len(self._fillers):
            if self._missing is MissingActions.ERROR:
                names = [name for at, name in self._names.items() if at not in values]
                raise CodecError(f"the actions {names} are missing, which this world needs")
            base = self._held if self._missing is MissingActions.HOLD else self._fillers
            values = {**base, **values}
        self._held = values
        return values


class LaneActions:
    """Columns of the actions of a step, with defaults for the slots that do not act.

    Args:
        contract: The environment's.
    """

    def __init__(self, contract: EnvContract) -> None:
        self._fillers = [filler_of_leaf(leaf) for leaf in leaves(contract.action_space)]
        # A tuple of texts cannot be changed by row, a list can.
        self._columns: list[Any] = [
            list(column) if isinstance(column, tuple) else column
            for column in empty_columns(contract.action_space, contract.num_envs)
        ]
        self.fill()

    def fill(self) -> None:
        """Set all rows to the defaults."""
        for filler, column in zip(self._fillers, self._columns, strict=True):
            column[:] = [filler] * len(column) if isinstance(column, list) else filler

    def put(self, row: Row, values: Mapping[int, Any]) -> None:
        """Set the rows of a slot to ``values``, by leaf."""
        for position, value in values.items():
            self._columns[position][row] = value

    def columns(self) -> list[Any]:
        """Return one column a leaf."""
        return [tuple(column) if isinstance(column, list) else column for column in self._columns]
