"""Guards that keep a session in the process that has opened it."""

import abc
import os
from typing import NoReturn

from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.options import FORK_REMEDY


class ForkGuard:
    """The process that has opened a session.

    A fork has a copy of the session, on the same memory and the same connection: its
    requests would be executed in its parent's episodes, and its parent would miss the answers.

    Args:
        address: Address of the endpoint, for error messages.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._pid = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Whether the session may be used here."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Make sure that this is the process that has opened the session.

        Raises:
            EndpointLostError: This process is a fork.
        """
        if not self.is_owner:
            raise EndpointLostError(
                f"the session belongs to process {self._pid}, of which this one is a fork: open "
                f"one in each process, and {FORK_REMEDY}",
                self._address,
            )


class NotPicklable:
    """Refuses to be pickled or copied, as Ray does with the arguments of a task."""

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """The address of the endpoint."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is a session and stays in its process; hand on its address, "
            f"{self.address!r}, and open another one there"
        )
