"""What keeps a client going in a thread, while faults are injected in another one."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.chaos.vector_client import LIMIT_S, Client
from tests.loopback.eventually import eventually


class Driver:
    """Calls ``advance`` of a client again and again, while it is entered; closes it in the end.

    Args:
        name: Of the row, for complaints.
        client: Which.
    """

    def __init__(self, name: str, client: Client) -> None:
        self._name, self._client = name, client
        self._num_advances = 0
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._drive)

    def see_answers(self, count: int) -> None:
        """Wait until the client has come round so many times, beginning now.

        Raises:
            TimeoutError: It has stopped.
            BaseException: The client's, for what it should have survived.
        """
        wanted = self._num_advances + count + 1
        self.wait(lambda: self._num_advances >= wanted, "the client has stopped")

    def wait(self, condition: Callable[[], bool], complaint: str) -> None:
        """Wait until something is so, while the client goes on; raises as ``see_answers``."""
        if not eventually(lambda: self._failure or condition(), LIMIT_S):
            raise TimeoutError(f"{self._name}: {complaint} for {LIMIT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def _drive(self) -> None:
        try:
            while not self._is_over.is_set():
                self._num_advances += self._client.advance()
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._failure = error
