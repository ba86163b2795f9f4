"""Print messages as the published client packs them, as JSON with hexadecimal digits.

``.venvs/openpi/bin/python tests/peers/openpi/record.py > tests/peers/openpi/messages.json``
"""

import json
import sys
from typing import Any

import numpy as np

MESSAGES: dict[str, Any] = {
    "slashes": {
        "observation/image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "observation/state": np.array([0.5, -1.0], np.float64),
        "prompt": "pick up the cup",
    },
    "nested": {
        "state": np.array([1.5, 2.0], np.float32),
        "images": {"cam_high": np.zeros((3, 1, 1), np.uint8)},
        "prompt": "größe",
    },
    "numbers": {
        "a": np.float32(0.5),
        "b": np.int64(-3),
        "c": np.bool_(True),
        "d": 2,
        "e": 0.25,
        "f": None,
        "g": True,
    },
    "result": {
        "actions": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
        "server_timing": {"infer_ms": 28.5},
    },
    "dtypes": {
        name: np.array([1, 0], name)
        for name in ("bool", "int8", "uint16", "int32", "uint64", "float16")
    },
    "empty": {"actions": np.zeros((0, 2), np.float32)},
    "metadata": {},
}


if __name__ == "__main__":
    from openpi_client import msgpack_numpy

    packed = {name: msgpack_numpy.packb(value).hex() for name, value in MESSAGES.items()}
    sys.stdout.write(f"{json.dumps(packed, indent=1)}\n")
