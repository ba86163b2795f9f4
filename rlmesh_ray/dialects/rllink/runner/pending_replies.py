"""Simulators that wait until they may go on."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from rlmesh_ray.dialects.rllink.runner.weights import WeightsVersion
from rlmesh_ray.dialects.rllink.wire import messages as m

MakeReply = Callable[[WeightsVersion], m.Reply | None]


@dataclass(slots=True, eq=False)
class _PendingReply:
    future: Future[m.Reply | None]
    reply: MakeReply
    can_wait: bool


class PendingReplies:
    """Answers that are still to be given, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: list[_PendingReply] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, reply: MakeReply, *, can_wait: bool) -> Future[m.Reply | None]:
        """Return an answer that comes with a later call of ``release``.

        Args:
            reply: Makes it of the weights of that moment.
            can_wait: Whether it waits for room, too.
        """
        waiting = _PendingReply(Future(), reply, can_wait)
        self._waiting.append(waiting)
        return waiting.future

    def release(self, weights: WeightsVersion, has_room: Callable[[], object]) -> None:
        """Answer those who may go on.

        Args:
            weights: The present ones.
            has_room: Whether one more may go on; asked anew for each, who takes of the room.
        """
        # The clients of some have gone meanwhile.
        waiting = [each for each in self._waiting if not each.future.cancelled()]
        self._waiting = []
        for each in waiting:
            if not each.can_wait or has_room():
                _resolve(each, weights)
            else:
                self._waiting.append(each)

    def cancel(self) -> None:
        """End all waiting."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.future.cancel()


def _resolve(waiting: _PendingReply, weights: WeightsVersion) -> None:
    # False: its client has gone at this very moment.
    if not waiting.future.set_running_or_notify_cancel():
        return
    try:
        waiting.future.set_result(waiting.reply(weights))
    except Exception as error:  # noqa: BLE001  # its client is told; the others go on
        waiting.future.set_exception(error)
