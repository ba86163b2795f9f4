"""Hash chains that now and then hang or raise, or that can be looked at and changed by calls."""

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.hash_chain import HashChain


class OrderedTrouble(HashChain):
    """Does once what an order says, in its next step.

    Args:
        path: Of the order, which is taken away by the step that obeys it.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def step(self, action: Any) -> Any:
        order = self._take() if os.path.exists(self._path) else ""
        kind, _, moment = order.partition(" ")
        if moment == "before":
            self._obey(kind)
        result = super().step(action)
        if moment == "after":
            self._obey(kind)
        return result

    def _take(self) -> str:
        own = Path(f"{self._path}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            Path(self._path).rename(own)
            return own.read_text()
        return ""

    @staticmethod
    def _obey(kind: str) -> None:
        if kind == "raise":
            raise RuntimeError("an order to raise")
        threading.Event().wait(float(kind))


def give_order(path: Path, order: str) -> None:
    """Have the next step of an ``OrderedTrouble`` sleep or raise.

    Args:
        path: Where it looks.
        order: Seconds or ``raise``, and whether ``before`` or ``after`` the chain goes on.
    """
    draft = path.with_suffix(".draft")
    draft.write_text(order)
    draft.replace(path)


class CalledChain(HashChain):
    """Answers calls about where it is; a mark changes its digest, but takes no step."""

    render_mode = "rgb_array"

    def look(self) -> list[float]:
        """Return the observation."""
        return [float(word) for word in self._position.observation()]

    def mark(self, number: int) -> list[float]:
        """Change the digest by ``number``; return the observation."""
        self._position = self._position.marked(number)
        return self.look()

    def render(self) -> Any:
        """Return the observation's bytes as a picture."""
        return np.frombuffer(self._position.observation().tobytes(), np.uint8).reshape(1, -1, 3)


def read_picture(picture: Any) -> list[float]:
    """Return the observation that ``CalledChain`` has rendered."""
    return [float(word) for word in np.frombuffer(picture.tobytes(), np.float32)]
