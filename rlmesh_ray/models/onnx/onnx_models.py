"""ONNX models, run on one thread of the CPU without torch: sessions, and policies of files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray import __version__
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    ContractMismatchError,
    MissingPackageError,
    PolicyError,
    install_command,
)
from rlmesh_ray.models.actions import (
    BatchBuckets,
    PaddedBatch,
    action_layout,
    require_spaces,
    zero_observations,
)
from rlmesh_ray.models.nesting import describe
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.spaces.batch import Leaf, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import DTYPES, SpaceSpec
from rlmesh_ray.wire.rlmesh_v1.specs import spec_from_json, spec_to_json

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
        self._run: Callable[..., list[NDArray[np.generic]]] = session.run
        self.inputs = [_value(each) for each in session.get_inputs()]
        """The model's inputs, in their order."""
        self.outputs = [_value(each) for each in session.get_outputs()]
        """The model's outputs, in their order."""
        self.metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        """What the model says of itself."""
        self._input_names = [each.name for each in self.inputs]

    def run(self, *inputs: NDArray[Any]) -> list[NDArray[np.generic]]:
        return self._run(None, dict(zip(self._input_names, inputs, strict=True)))


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


# --- a policy that is an ONNX file ----------------------------------------------------------------

# ``policy_export`` writes such files. Those of other programs are served, too: their inputs and
# outputs are matched with the leaves of the spaces by name, or by their order.

_OBSERVATION_SPACE = "rlmesh_ray.observation_space"
_ACTION_SPACE = "rlmesh_ray.action_space"
_PRODUCER = "rlmesh_ray.producer"
_ALGORITHM = "rlmesh_ray.algorithm"
_MOST_SPACES = 64


def metadata_of(observation: SpaceSpec, action: SpaceSpec, algorithm: str) -> dict[str, str]:
    """Return what a file says of itself, for its ``metadata_props``.

    Args:
        observation: Observation space of one lane.
        action: Action space of one lane.
        algorithm: The algorithm that trained it; empty: unknown.
    """
    return {
        _OBSERVATION_SPACE: spec_to_json(observation),
        _ACTION_SPACE: spec_to_json(action),
        _PRODUCER: f"rlmesh-ray {__version__}",
        **({_ALGORITHM: algorithm} if algorithm else {}),
    }


def input_names(observation: SpaceSpec) -> tuple[str, ...]:
    """Return the names of an exported file's inputs.

    They are those of the leaves of a Dict, such as ``"camera.depth"``, so that a flat Dict is what
    ONNX Runtime takes; else ``observation``, with what ``Leaf.name`` has.
    """
    return _distinct(
        [
            # torch's exporter does not take digits alone.
            leaf.name if leaf.name[:1].strip("0123456789") else _dotted("observation", leaf)
            for leaf in leaves(observation)
        ]
    )


def output_names(observation: SpaceSpec, action: SpaceSpec) -> tuple[str, ...]:
    named = [_dotted("action", leaf) for leaf in leaves(action)]
    inputs = input_names(observation)
    return _distinct([*inputs, *named])[len(inputs) :]


def _dotted(root: str, leaf: Leaf) -> str:
    return f"{root}.{leaf.name}" if leaf.name else root


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        while name in found:
            name += "_"
        found.append(name)
    return tuple(found)


class OnnxFilePolicy:
    """Runs an ONNX model on one thread of the CPU.

    A file of ``policy_export`` says what its spaces are, and no other spaces are accepted. Of
    another file's model a trial run with zeros shows whether it fits: it has an input for each leaf
    of the observation space, and for each leaf of the action space an output by the rules in
    ``TorchPolicy``.

    Args:
        model: The serialized model.
        name: Its name, for messages.
        horizon: How many actions it chooses at once for each row.

    Raises:
        ConfigurationError: It keeps numbers in other files, which are not read.
        MissingPackageError: onnx or onnxruntime is missing.
        PolicyError: It is damaged, or needs what ONNX Runtime does not have.
    """

    def __init__(self, model: bytes, name: str, *, horizon: int = 1) -> None:
        self._name = name
        may_loop = check_model(model, name)
        try:
            self._session = OnnxSession(model)
        except MissingPackageError:
            raise
        except Exception as error:  # ONNX Runtime's errors have no base class of their own
            raise PolicyError(f"{name} cannot be loaded by ONNX Runtime: {error}") from error
        self._spaces = _spaces_in(self._session.metadata, name)
        self._places = lru_cache(_MOST_SPACES)(self._place)
        sizes = {each.shape[0] for each in self._session.inputs if each.shape} - {None}
        if len(sizes) > 1 or 0 in sizes:
            raise ConfigurationError(
                f"{name} has inputs of {sorted(map(str, sizes))} rows; their first axis must be "
                "that of the batch"
            )
        # A model with a fixed number of rows gets no other.
        self._buckets = BatchBuckets([size for size in sizes if size is not None])
        observation_space, action_space = self._spaces or (None, None)
        self.traits = PolicyTraits(
            is_repeatable=True,
            only_computes=not may_loop,
            observation_space=observation_space,
            action_space=action_space,
            kind="ONNX",
            algorithm=self._session.metadata.get(_ALGORITHM, ""),
            checks_concurrently=True,
            horizon=horizon,
            torch_reason=lambda: None,
        )

    def check_contract(self, contract: EnvContract) -> None:
        """Compare the spaces with those that the file names, and run the model on zeros.

        Raises:
            ContractMismatchError: They differ, or the model does not take the contract's
                observations, or its outputs cannot be actions of the action space.
        """
        if self._spaces is not None:
            spaces = [*map(to_gymnasium, self._spaces)]
            remedy = "export a policy of this environment"
            require_spaces(spaces, contract, f"{self._name} was exported for", remedy)
        layout = action_layout(contract.action_space, self.traits.horizon)
        try:
            for num_rows in (1, 2):
                columns = flatten(contract.observation_space, zero_observations(contract, num_rows))
                for part in self._buckets.parts(num_rows):
                    layout.outputs(self._run(contract, columns, part), part)
        except PolicyError as error:
            raise ContractMismatchError(
                f"{self._name} cannot act in {contract.id}: {error}"
            ) from error

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return the model's actions; of logits the largest wins, as in ``TorchPolicy``.

        Raises:
            PolicyError: The model failed, or its output has another form.
        """
        layout = action_layout(contract.action_space, self.traits.horizon)
        columns = flatten(contract.observation_space, rows.observations)
        return layout.joined(
            [
                layout.actions(self._run(contract, columns, part), part)
                for part in self._buckets.parts(rows.num_rows)
            ]
        )

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: the model has no state of lanes."""

    def _run(self, contract: EnvContract, columns: Sequence[Any], part: PaddedBatch) -> Any:
        of_inputs, of_outputs = self._places(contract.observation_space, contract.action_space)
        parts = leaves(contract.observation_space)
        given = [
            _fed(declared, parts[number], columns[number], part)
            for declared, number in zip(self._session.inputs, of_inputs, strict=True)
        ]
        try:
            found = self._session.run(*given)
        except Exception as error:  # as above
            raise PolicyError(
                f"the ONNX model failed on observations {describe(tuple(given))}: {error}"
            ) from error
        return unflatten(contract.action_space, [found[each] for each in of_outputs])

    def _place(self, observation: SpaceSpec, action: SpaceSpec) -> tuple[list[int], Sequence[int]]:
        """Return the leaf of each input, and the output of each leaf of the action space."""
        inputs = [each.name for each in self._session.inputs]
        outputs = [each.name for each in self._session.outputs]
        own_inputs = (input_names(observation), _leaf_names(observation))
        own_outputs = (output_names(observation, action), _leaf_names(action))
        of_leaves = _order(inputs, own_inputs, "an input")
        of_inputs = [of_leaves.index(position) for position in range(len(inputs))]
        return of_inputs, _order(outputs, own_outputs, "an output")


def _leaf_names(spec: SpaceSpec) -> tuple[str, ...]:
    return tuple(leaf.name for leaf in leaves(spec))


def _order(given: Sequence[str], candidates: Sequence[Sequence[str]], what: str) -> Sequence[int]:
    """Return the position of each leaf's input or output.

    Args:
        given: Names of the inputs or outputs, in their order.
        candidates: Names of the leaves, any of which the model may use.
        what: ``an input`` or ``an output``. There may be more outputs than leaves.

    Raises:
        PolicyError: Some names agree and others do not, or neither names nor numbers do.
    """
    for names in candidates:
        is_subset = set(names) <= set(given)
        if is_subset and (what == "an output" or len(names) == len(given)):
            return [given.index(name) for name in names]
    wanted = candidates[0]
    # By their order, unless some have the names of leaves: then those of others are missing.
    if len(wanted) == len(given) and not set(given).intersection(*map(set, candidates)):
        return range(len(given))
    raise PolicyError(
        f"it has {what} each for {', '.join(given) or 'nothing'}, where {', '.join(wanted)} is "
        "needed; export it again with these names"
    )


def _fed(declared: OnnxValue, leaf: Leaf, column: NDArray[Any], part: PaddedBatch) -> NDArray[Any]:
    """Return a leaf's rows as an input takes them, padded with zeros.

    Raises:
        PolicyError: Their shape or dtype is another one.
    """
    shape = (part.size, *leaf.shape)
    is_shaped = not declared.shape or (
        len(shape) == len(declared.shape)
        and all(size in (None, own) for own, size in zip(shape, declared.shape, strict=True))
    )
    kind, target = column.dtype, declared.dtype
    if not is_shaped or target is None or not np.can_cast(kind, target, "same_kind"):
        sizes = ", ".join("n" if size is None else str(size) for size in declared.shape)
        raise PolicyError(
            f"its input {declared.name} takes {target or 'something else than numbers'} ({sizes}), "
            f"and the observation is {describe(column)}"
        )
    with np.errstate(over="ignore"):
        rows = column[part.rows].astype(target, copy=False)
    if kind != target and _has_changed(column[part.rows], rows):
        raise PolicyError(
            f"its input {declared.name} takes {target}, which the observation exceeds"
        )
    if part.size == part.num_rows:
        return rows
    return np.concatenate([rows, np.zeros((part.size - part.num_rows, *leaf.shape), target)])


def _has_changed(given: NDArray[Any], cast: NDArray[Any]) -> bool:
    """Return whether a cast has changed an integer, or made a float infinite."""
    if given.dtype.kind in "iu":
        return not np.array_equal(cast, given)
    return bool((np.isinf(cast) & np.isfinite(given)).any())


def _spaces_in(metadata: Mapping[str, str], name: str) -> tuple[SpaceSpec, SpaceSpec] | None:
    """Return observation and action space; None: the file does not name them.

    Raises:
        PolicyError: It names something else.
    """
    texts = [metadata.get(key) for key in (_OBSERVATION_SPACE, _ACTION_SPACE)]
    if texts == [None, None]:
        return None
    try:
        observation, action = (spec_from_json(text or "") for text in texts)
    except CodecError as error:
        raise PolicyError(
            f"{name} has no valid spaces in its metadata ({error}); export it again"
        ) from error
    return observation, action
