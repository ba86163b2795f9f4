"""Whether a policy's module runs in torch or compiled: the option ``inference``."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rlmesh_ray.errors import ConfigurationError

_LOG = logging.getLogger(__name__)

_LEFT_TO_TORCH = "the last batch was left to torch, for its form or its numbers, or for hooks"


class Compiled(Protocol):
    """A compiled module."""

    def run(self, *batch: Any) -> Any | None:
        """Return the outputs, as torch's; None: torch must be asked for this batch.

        Raises:
            ConfigurationError: As ``load``, if weights were changed in place.
        """

    def load(self) -> None:
        """Take the module's weights as they are now.

        Raises:
            ConfigurationError: It computes something else now, or cannot take them.
        """


class InferenceChoice:
    """Runs a module in torch or compiled, and says why.

    Args:
        inference: ``"torch"``; ``"compiled"``, which raises where that is impossible; or
            ``"auto"``: compiled where that is possible.
        compile: Makes the compiled module, from an example of its batch. It raises
            ConfigurationError with the reason where that is impossible, or where the compiled
            module computes something else.
        device: Torch's type of the module's device. Only on a CPU ``compile`` is used; elsewhere
            the caller has torch compile the module, for ``"compiled"`` alone.
    """

    def __init__(
        self, inference: str, compile: Callable[..., Compiled], device: str = "cpu"
    ) -> None:
        self._inference = self._asked = inference
        self._compile, self._device = compile, device
        self._compiled: Compiled | None = None
        # Contracts are checked in several threads.
        self._lock = threading.Lock()
        self._reason: str | None = "the first batch decides"
        self._left_to_torch: str | None = None
        self.refusal = ""
        """Why compiling, which had to be done, failed, with the remedy; empty: it did not."""
        if inference == "torch":
            self._fall_back('inference="torch" says so')
        elif device != "cpu" and inference == "auto":
            self._fall_back(f'inference="auto" is torch on {device}')
        elif device != "cpu":
            self._inference = "torch"
            self._take()

    def __reduce__(self) -> tuple[Any, ...]:
        return InferenceChoice, (self._asked, self._compile, self._device)

    def torch_reason(self) -> str | None:
        """Why the module runs in torch, or ran the last batch there; None: it runs compiled."""
        return self._reason or self._left_to_torch

    def load(self) -> None:
        """Take the module's weights as they are now; to be called after each change of them.

        Raises:
            ConfigurationError: As ``prepare``; the next batch compiles anew.
        """
        with self._lock:  # or a module that is just being compiled would keep the former ones
            self.refusal = ""
            if self._compiled is not None:
                try:
                    self._compiled.load()
                except Exception as error:  # noqa: BLE001  # ONNX Runtime's have no base class
                    self._refuse(error)  # else the former weights would act

    def prepare(self, *batch: Any) -> None:
        """Compile, unless that has been done or tried.

        Args:
            batch: An example of a batch.

        Raises:
            ConfigurationError: It is impossible, and ``inference`` is ``"compiled"``.
        """
        with self._lock:
            if self._compiled is not None or self._inference == "torch":
                return
            try:
                self._compiled = self._compile(*batch)
            except Exception as error:  # noqa: BLE001  # as above
                self._refuse(error, is_final=True)
                return
            self.refusal = ""
            self._take()

    def run(self, in_torch: Callable[..., Any], *batch: Any) -> Any:
        """Return the module's outputs for a batch.

        Args:
            in_torch: Runs the module in torch.
            batch: The batch.

        Raises:
            ConfigurationError: As ``prepare``, which is not tried again before ``load``.
        """
        if self._compiled is None and self._inference != "torch":
            if self.refusal:
                raise ConfigurationError(self.refusal)
            self.prepare(*batch)
        compiled = self._compiled
        if compiled is None:
            return in_torch(*batch)
        try:
            found, self._left_to_torch = compiled.run(*batch), None
        except ConfigurationError as error:
            self._refuse(error)
            return in_torch(*batch)
        except Exception as error:  # noqa: BLE001  # as above; torch says what is wrong with it
            self._left_to_torch = _unexpected(error)
            return in_torch(*batch)
        if found is None:
            self._left_to_torch = _LEFT_TO_TORCH
            return in_torch(*batch)
        return found

    def _take(self) -> None:
        self._reason = None
        _LOG.info("the module runs compiled")

    def _refuse(self, error: Exception, *, is_final: bool = False) -> None:
        reason = str(error) if isinstance(error, ConfigurationError) else _unexpected(error)
        if self._inference == "compiled":
            refusal = f'inference="compiled" is impossible: {reason}; use "auto" or "torch"'
            self._compiled, self._reason = None, refusal
            self.refusal = refusal if is_final else ""
            raise ConfigurationError(refusal) from error
        self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        self._inference, self._compiled, self._reason = "torch", None, reason
        _LOG.info("the module runs in torch: %s", reason)


def _unexpected(error: Exception) -> str:
    (reason, *_) = str(error).splitlines() or [""]
    return f"it fails in ONNX Runtime: {type(error).__name__}: {reason}"
