"""States of the lanes of a dm_env_rpc world, and the reset options of their next episodes."""

from rlmesh_ray.dialects.dm_env_rpc.protocol.sequences import LanesStepped, LaneState, ResetLanes


class WorldLanes:
    """The lanes of one world.

    Args:
        num_lanes: How many; all of them are NEW.
    """

    def __init__(self, num_lanes: int) -> None:
        self._states = [LaneState.NEW] * num_lanes
        self._first_frames: dict[int, object] = {}
        self._world_reset_options: object = None
        self._reset_options: dict[int, object] = {}
        self._is_autoreset_welcome = True
        self.generation = 0
        """Grows when all lanes start over: the outcome of work begun before is dropped."""

    def reset_options(self, lane: int, reset_options: object) -> None:
        """Set the options of the reset before the next episode of a lane."""
        self._reset_options[lane] = reset_options

    def forget_reset_options(self, lane: int) -> None:
        """Clear them."""
        self._reset_options.pop(lane, None)

    def restart(self, reset_options: object, *, is_autoreset_welcome: bool) -> None:
        """Make all lanes begin new episodes; see ``World.restart``."""
        self._world_reset_options, self._is_autoreset_welcome = reset_options, is_autoreset_welcome
        self.lose()

    def lose(self) -> None:
        """Forget the states of all lanes."""
        self.generation += 1
        self._states = [LaneState.NEW] * len(self._states)
        self._first_frames.clear()

    def missing_reset(self, lane: int) -> ResetLanes | None:
        """Return the reset that a lane needs before it can ``begin``; None: it needs none."""
        if self._states[lane] is LaneState.NEW:
            return ResetLanes((), self._world_reset_options)
        if self._states[lane] is LaneState.FRESH and lane not in self._reset_options:
            return None
        return ResetLanes((lane,), self._reset_options.get(lane))

    def begin(self, lane: int) -> object:
        """Begin the episode of a lane; return its first frame."""
        self._states[lane] = LaneState.LIVE
        return self._first_frames.pop(lane)

    def ended(self) -> tuple[int, ...]:
        """Return the lanes whose episode has ended, and that have not begun another."""
        if LaneState.ENDED not in self._states:
            return ()
        return tuple(n for n, state in enumerate(self._states) if state is LaneState.ENDED)

    def note_reset(self, done: ResetLanes, frame: object) -> None:
        """Handle the outcome of a reset."""
        for lane in done.lanes or range(len(self._states)):
            self._show_first(lane, frame)
            if done.lanes and self._reset_options.get(lane) is done.reset_options:
                self._reset_options.pop(lane, None)
        if not done.lanes:
            # A seed is for one reset; the options that an agent has set for its lane remain.
            self._world_reset_options = None

    def note_step(self, outcome: LanesStepped) -> None:
        """Handle the outcome of a step."""
        for lane, state in enumerate(self._states):
            if outcome.has_ended[lane]:
                self._states[lane] = LaneState.ENDED
            elif state is LaneState.ENDED and self._is_autoreset_welcome:
                self._show_first(lane, outcome.frame)
            else:
                self._states[lane] = LaneState.LIVE

    def _show_first(self, lane: int, frame: object) -> None:
        self._states[lane] = LaneState.FRESH
        self._first_frames[lane] = frame
