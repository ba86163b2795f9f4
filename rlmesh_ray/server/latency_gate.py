"""Whether a policy is so quick that the serving loop may run it itself.

A thread of its own lets a policy hang without anybody else noticing. For a small network it costs
several times what the network takes: two threads that compute by turns hand the interpreter's lock
over at each operation of torch, and the caches begin cold. So a policy that only computes is run
in the loop once it has shown that it takes no time worth mentioning, and no longer when it does.
"""

_QUICK_S = 0.002
_NEVER_S = 0.1
_WEIGHT = 0.05
_NUM_TO_PROVE = 100
_NUM_TO_PROVE_AGAIN = 1000


class LatencyGate:
    """Watches how long batches take.

    Args:
        only_computes: Whether the policy waits for nothing: no files, no locks, no other device.
    """

    def __init__(self, *, only_computes: bool) -> None:
        self._only_computes = only_computes
        self._num_to_prove = _NUM_TO_PROVE
        self._mean_s = 0.0

    @property
    def is_fast(self) -> bool:
        """Whether the policy only computes, and batches take 2 ms at most in the running mean.

        A mean, since on a busy machine any batch may be interrupted for some milliseconds.
        """
        return self._only_computes and not self._num_to_prove and self._mean_s <= _QUICK_S

    def note(self, took_s: float) -> None:
        """Take note of a batch. After one of more than 0.1 s a thousand must prove it anew."""
        self._mean_s += _WEIGHT * (took_s - self._mean_s)
        if took_s > _NEVER_S:
            self._num_to_prove = _NUM_TO_PROVE_AGAIN
        elif self._num_to_prove:
            self._num_to_prove -= 1
