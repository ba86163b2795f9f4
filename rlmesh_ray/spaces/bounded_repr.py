"""repr() in bounded time and length, for values of the infos that have no wire form."""

import reprlib
from collections.abc import Mapping

import numpy as np

LEFT_OUT_KEY = "rlmesh_ray.left_out"
"""Key of the infos for the notice that entries were left out."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, np.ndarray)
"""Types whose values have parts."""


def bounded_repr(value: object) -> str:
    return _BOUNDED_REPR.repr(value)


def type_repr(value: object) -> str:
    """Return a text that names only the type of ``value``; never fails."""
    return f"<{type(value).__name__}>"


def left_out_notice(num_entries: int) -> str:
    return (
        f"{num_entries} entries of the infos were left out or made text, for one message cannot "
        "carry so many: give fewer, or numeric numpy arrays, which count as one each"
    )


def int_repr_cost(number: int) -> int:
    """Return the time to write ``number`` in decimal, in units of a small value, roughly."""
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
        """Name the type of a large integer; ``Repr`` would write all digits and cut them then."""
        return type_repr(x) if x.bit_length() > _MAX_BITS else super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        """Name the type of another container; its ``repr`` would go through all its parts."""
        return type_repr(x) if isinstance(x, CONTAINERS) else super().repr_instance(x, level)


_BOUNDED_REPR = _BoundedRepr()
