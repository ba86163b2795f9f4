"""Text for what infos cannot carry as it is, in bounded time whatever it holds."""

import reprlib
from collections.abc import Mapping

import numpy as np

LEFT_OUT_KEY = "rlmesh_ray.left_out"
"""Key of the infos under which a message says what it has left out."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, np.ndarray)
"""What has parts; all else is one value."""


def bounded_repr(value: object) -> str:
    """Return a text of at most some thousand characters for a container, of its first parts."""
    return _BOUNDED_REPR.repr(value)


def type_repr(value: object) -> str:
    """Return a text for what has no other; never fails."""
    return f"<{type(value).__name__}>"


def left_out_notice(num_entries: int) -> str:
    """Return what stands under ``LEFT_OUT_KEY``."""
    return (
        f"{num_entries} entries of the infos were left out or made text, for one message cannot "
        "carry so many: give fewer, or numeric numpy arrays, which count as one each"
    )


def int_repr_cost(number: int) -> int:
    """Return how many small values the text of ``number`` takes as long as, about."""
    return number.bit_length() // 64


_MAX_BITS = 4096


class _BoundedRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = 16
        self.maxset = self.maxfrozenset = 256
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_int(self, x: int, level: int) -> str:
        """Name what takes long to write; ``Repr`` would write all of it, to cut it then."""
        return type_repr(x) if x.bit_length() > _MAX_BITS else super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        """Name containers of other classes; their own ``repr`` would go through all they hold."""
        return type_repr(x) if isinstance(x, CONTAINERS) else super().repr_instance(x, level)


_BOUNDED_REPR = _BoundedRepr()
