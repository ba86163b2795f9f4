"""An event loop for tests of timers: its clock jumps to the next one, so that nothing waits."""

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is work, and else jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]
