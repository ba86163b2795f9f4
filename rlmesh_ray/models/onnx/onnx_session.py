"""ONNX Runtime sessions on one thread of the CPU, with weights that can be replaced."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, PolicyError, install_command
from rlmesh_ray.spaces.spec import DTYPES

Arrays = Sequence[NDArray[Any]]
Weights = Mapping[str, NDArray[Any]]
# ONNX Runtime's names of types that NumPy calls otherwise.
_NUMPY_NAMES = {"tensor(float)": "float32", "tensor(double)": "float64"}


class OnnxValue(NamedTuple):
    """An input or output of a model, as the model declares it."""

    name: str
    dtype: np.dtype[Any] | None
    """None: it holds something else than numbers."""
    shape: tuple[int | None, ...]
    """None: any size. Empty also where the model does not declare it."""


class OnnxSession:
    """Runs a model.

    Args:
        model: The serialized model.
        weights: Arrays that take the place of the model's weights of the same names. The session
            works on these arrays themselves as far as it can, so that they can be written to
            later; whether it could shows in its results only. None: it rearranges the model's own
            weights for its layers, and is faster.

    Raises:
        MissingPackageError: onnxruntime is missing.
    """

    def __init__(self, model: bytes, weights: Weights | None = None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingPackageError(
                f"running ONNX models needs: {install_command('onnx')}"
            ) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: it warns of weights that an optimisation left over
        options.intra_op_num_threads = 1  # small models: more would wait for each other
        options.inter_op_num_threads = 1
        if weights is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._weights: dict[str, Any] = {}
        for name, array in (weights or {}).items():
            self._weights[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(name, self._weights[name])
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"] if weights is not None else [],
        )
        self._run = session.run
        self.inputs = [_value(each) for each in session.get_inputs()]
        """The model's inputs, in their order."""
        self.outputs = [_value(each) for each in session.get_outputs()]
        """The model's outputs, in their order."""
        self.metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        """What the model says of itself."""
        self._input_names = [each.name for each in self.inputs]

    def run(self, *inputs: NDArray[Any]) -> list[NDArray[np.generic]]:
        outputs: list[NDArray[np.generic]] = self._run(
            None, dict(zip(self._input_names, inputs, strict=True))
        )
        return outputs


def _value(declared: Any) -> OnnxValue:
    name = _NUMPY_NAMES.get(declared.type, declared.type.removeprefix("tensor(").rstrip(")"))
    shape = tuple(size if isinstance(size, int) else None for size in declared.shape)
    return OnnxValue(declared.name, np.dtype(name) if name in DTYPES else None, shape)


def check_model(model: bytes, name: str) -> bool:
    """Check that a model reads no files, as ONNX Runtime would; return whether it has loops.

    Args:
        model: The serialized model.
        name: Its name, for messages.

    Raises:
        ConfigurationError: It keeps numbers in other files.
        MissingPackageError: onnx is missing.
        PolicyError: It is no ONNX model.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingPackageError(
            f"{name}, an ONNX model, needs: {install_command('onnx')}"
        ) from error
    parsed = onnx.ModelProto()
    try:
        parsed.ParseFromString(model)
    except Exception as error:  # protobuf's implementations raise different errors
        raise PolicyError(f"{name} is damaged, or no ONNX model: {error}") from error
    may_loop = False
    for part in _messages(parsed):
        if isinstance(part, onnx.TensorProto) and (
            part.external_data or part.data_location == onnx.TensorProto.EXTERNAL
        ):
            raise ConfigurationError(
                f"{name} keeps the numbers of {part.name} in another file, and a policy is read "
                "from one file alone; save it as one: onnx.save(onnx.load(FILE), NEW_FILE)"
            )
        may_loop = may_loop or (isinstance(part, onnx.NodeProto) and part.op_type == "Loop")
    return may_loop


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            parts = [value] if hasattr(value, "ListFields") else value
            for part in parts:
                yield from _messages(part)
