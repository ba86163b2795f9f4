"""The game of Catch on a small board, for servers of several protocols.

NumPy alone is imported: another virtual environment runs this, too.
"""

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 10, 5


class CatchGame:
    """A ball falls by a row each step, a paddle in the last row is moved.

    Args:
        seed: Of the columns in which balls start.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._row = self._ball = self._paddle = 0

    def begin(self) -> NDArray[np.float32]:
        """Let go of a ball; return the board, ``(ROWS, COLUMNS) float32``."""
        self._row, self._paddle = 0, COLUMNS // 2
        self._ball = int(self._rng.integers(COLUMNS))
        return self._board()

    def move(self, direction: int) -> tuple[NDArray[np.float32], float, bool]:
        """Move the paddle by -1, 0 or 1.

        Returns:
            The board, the reward, and whether the ball is down.
        """
        self._paddle = min(max(self._paddle + direction, 0), COLUMNS - 1)
        self._row += 1
        is_down = self._row == ROWS - 1
        caught = 1.0 if self._paddle == self._ball else -1.0
        return self._board(), caught if is_down else 0.0, is_down

    def _board(self) -> NDArray[np.float32]:
        board = np.zeros((ROWS, COLUMNS), np.float32)
        board[self._row, self._ball] = 1.0
        board[ROWS - 1, self._paddle] = 1.0
        return board
