"""Whether a runner's module runs in torch or compiled: ``configure(inference=...)``."""

import logging
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.fast_path.module_forward import batch_of
from rlmesh_ray.models.onnx.compiled_forward import TOLERANCE
from rlmesh_ray.models.rllib.compiled_module import CompiledModule

_LOG = logging.getLogger(__name__)

_NUM_COMPARED = 8
"""Batches that ``"auto"`` runs both ways."""

Output = dict[str, Any]
InTorch = Callable[[NDArray[Any], int], Output]


class InferenceChoice:
    """Chooses, for one runner, one module, and exploring or not.

    Args:
        module: The runner's module.
        inference: ``"torch"``; ``"compiled"``, which raises where that is impossible; or
            ``"auto"``: compiled, if the first batches show that it computes the same, sooner.
        seed: Of compiled draws; None: a random one.
        explore: Whether the module explores.
        clock: Returns seconds.
    """

    def __init__(
        self,
        module: Any,
        inference: str,
        *,
        seed: int | None,
        explore: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.module = module
        """The module that is run."""
        self._inference = inference
        self._seed, self._explore, self._clock = seed, explore, clock
        self._compiled: CompiledModule | None = None
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self.torch_reason: str | None = "nothing has been computed yet"
        """Why the module runs in torch; None: it runs compiled."""
        if inference == "torch":
            self._fall_back('configure(inference="torch") says so')

    def begin(self) -> None:
        """Take the module's weights, at the beginning of a call of ``sample``."""
        if self._compiled is None:
            return
        try:
            self._compiled.require_unhooked()
        except ConfigurationError as error:
            self._refuse(error)
        else:
            self._compiled.forward.load()

    def _compile(self, rows: NDArray[Any]) -> None:
        try:
            if any(each.device.type != "cpu" for each in self.module.parameters()):
                raise ConfigurationError("the module is not on the CPU")
            example = batch_of(np.concatenate([rows[:1], rows[:1]]), None)[Columns.OBS]
            self._compiled = CompiledModule(
                self.module, example, explore=self._explore, seed=self._seed
            )
        except ConfigurationError as error:
            self._refuse(error)
            return
        if self._inference == "compiled":
            self._take()

    def run(self, rows: NDArray[Any], t: int, in_torch: InTorch) -> Output:
        """Return the module's outputs and actions.

        Args:
            rows: Observations.
            t: Environment steps of the training.
            in_torch: Computes the same in torch.
        """
        if self._inference != "torch" and self._compiled is None:
            self._compile(rows)
        if self._compiled is None:
            return in_torch(rows, t)
        if self.torch_reason is None:
            found = self._compiled.output(rows, t)
            return in_torch(rows, t) if found is None else found
        return self._compare(self._compiled, rows, t, in_torch)

    def _compare(
        self, compiled: CompiledModule, rows: NDArray[Any], t: int, in_torch: InTorch
    ) -> Output:
        times_s = [self._clock()]
        output = in_torch(rows, t)
        times_s.append(self._clock())
        compiled.output(rows, t)
        times_s.append(self._clock())
        for seconds, (began_s, ended_s) in zip(self._seconds, pairwise(times_s), strict=True):
            seconds.append(ended_s - began_s)
        difference = compiled.forward.difference([rows])
        if difference > TOLERANCE:
            self._fall_back(f"compiled results differ by {difference:.1e} from torch's")
        elif len(self._seconds[0]) == _NUM_COMPARED:
            in_torch_s, compiled_s = map(statistics.median, self._seconds)
            if compiled_s < in_torch_s:
                self._take()
            else:
                self._fall_back(
                    f"compiled it takes {compiled_s * 1e6:.0f} us for {len(rows)} rows, and "
                    f"{in_torch_s * 1e6:.0f} us in torch"
                )
        return output

    def _take(self) -> None:
        self.torch_reason = None
        _LOG.info("the module runs compiled")

    def _refuse(self, error: ConfigurationError) -> None:
        if self._inference == "compiled":
            raise ConfigurationError(
                f'inference="compiled" is impossible: {error}; use "auto" or "torch"'
            ) from error
        self._fall_back(str(error))

    def _fall_back(self, reason: str) -> None:
        self._inference, self._compiled, self.torch_reason = "torch", None, reason
        _LOG.info("the module runs in torch: %s", reason)
