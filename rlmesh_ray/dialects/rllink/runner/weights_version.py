"""WeightsVersion: one version of the weights that simulators act with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph


@dataclass(slots=True, eq=False)
class WeightsVersion:
    """One version of a module's weights; the arrays are immutable."""

    seq_no: int
    state: Mapping[str, NDArray[Any]]
    extras: m.Extras
    """What else clients must know to act with them."""
    num_env_steps: int = 0
    """How many steps had been sampled by then: some modules explore accordingly."""
    _onnx: bytes = field(default=b"", repr=False)

    def onnx(self, model: OnnxGraph) -> bytes:
        """Return them as a model; made once, so one thread at a time may ask."""
        if not self._onnx:
            self._onnx = model.serialized(self.state)
        return self._onnx
