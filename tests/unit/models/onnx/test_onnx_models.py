"""ONNX files as policies, also those of other programs, and files that are refused."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.onnx.onnx_models import OnnxFilePolicy, metadata_of
from rlmesh_ray.models.policy import RouteRows, Rows, UpdatablePolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)

F, INT, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
Port = tuple[str, int, Sequence[int | str]]


def box(*shape: int, dtype: str = "float32") -> BoxSpec:
    return BoxSpec(shape, dtype, np.zeros(shape, dtype).tobytes(), np.ones(shape, dtype).tobytes())


def contract(observations: SpaceSpec, actions: SpaceSpec) -> EnvContract:
    return EnvContract("Test-v0", observations, actions, 2, AutoresetMode.DISABLED)


def model(
    inputs: Sequence[Port], outputs: Sequence[Port], *nodes: Any, initializers: Sequence[Any] = ()
) -> ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "policy",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def same(name: str = "obs", rows: int | str = "n", kind: int = F) -> ModelProto:
    """A model that returns its input, rows of three numbers."""
    node = helper.make_node("Identity", [name], ["out"])
    return model([(name, kind, [rows, 3])], [("out", kind, [rows, 3])], node)


def policy_of(made: ModelProto) -> OnnxFilePolicy:
    return OnnxFilePolicy(made.SerializeToString(), "policy.onnx")


def act(policy: OnnxFilePolicy, of_env: EnvContract, observations: Any, num_rows: int) -> Any:
    policy.check_contract(of_env)
    slots = [PredictSlot(lane, "", 0, False) for lane in range(num_rows)]
    return policy.predict(of_env, Rows(observations, [RouteRows("r", slots)]))


OBSERVATIONS = np.random.default_rng(0).random((5, 3), np.float32)


def test_of_logits_the_largest_wins_and_other_outputs_are_the_actions() -> None:
    logits = OBSERVATIONS.argmax(axis=1) + 4

    assert np.array_equal(
        act(policy_of(same()), contract(box(3), DiscreteSpec(3, start=4)), OBSERVATIONS, 5), logits
    )
    columnwise = np.asfortranarray(OBSERVATIONS)
    assert np.array_equal(
        act(policy_of(same()), contract(box(3), box(3)), columnwise, 5), OBSERVATIONS
    )


def test_logits_of_nan_become_an_action_outside_of_the_space() -> None:
    observations = OBSERVATIONS.copy()
    observations[1, 2] = np.nan

    actions = act(policy_of(same()), contract(box(3), DiscreteSpec(3)), observations, 5)

    assert actions[1] == 3


@pytest.mark.parametrize("rows", [1, 4])
def test_a_model_of_a_fixed_number_of_rows_gets_no_other(rows: int) -> None:
    of_env = contract(box(3), box(3))

    assert np.array_equal(act(policy_of(same(rows=rows)), of_env, OBSERVATIONS, 5), OBSERVATIONS)


@pytest.mark.parametrize("dtype", ["float64", "uint8", "int32"])
def test_numbers_are_converted_to_what_the_model_takes(dtype: str) -> None:
    observations = (OBSERVATIONS * 9).astype(dtype)

    actions = act(policy_of(same()), contract(box(3, dtype=dtype), box(3)), observations, 5)

    assert np.array_equal(actions, observations.astype(np.float32))


PLAYER = DictSpec((("x", box(2)), ("y", box(1))))
X, Y = OBSERVATIONS[:, :2], OBSERVATIONS[:, 2:]


@pytest.mark.parametrize(
    ("inputs", "first"),
    [(("x", "y"), "x"), (("y", "x"), "x"), (("a", "b"), "a")],
    ids=["names", "names in another order", "no names in common: by order"],
)
def test_leaves_are_matched_by_name_or_else_by_order(inputs: Sequence[str], first: str) -> None:
    sizes = [2 if name == first else 1 for name in inputs]
    made = model(
        [(name, F, ["n", size]) for name, size in zip(inputs, sizes, strict=True)],
        [("extra", F, ["n", 1]), ("action.x", F, ["n", 2]), ("action.y", F, ["n", 1])],
        *(
            helper.make_node("Identity", [name], [f"action.{'x' if name == first else 'y'}"])
            for name in inputs
        ),
        helper.make_node("Identity", [next(n for n in inputs if n != first)], ["extra"]),
    )

    actions = act(policy_of(made), contract(PLAYER, PLAYER), {"x": X, "y": Y}, 5)

    assert np.array_equal(actions["x"], X)
    assert np.array_equal(actions["y"], Y)


COPY = helper.make_node("Identity", ["y"], ["out"])


@pytest.mark.parametrize(
    ("made", "observation", "action", "reason"),
    [
        (same(), box(4), box(3), r"its input obs takes float32 \(n, 3\), .* float32 \(1, 4\)"),
        (same(), box(3, 1), box(3), r"takes float32 \(n, 3\), and the .* float32 \(1, 3, 1\)"),
        (same(kind=INT), box(3), box(3), r"takes int64 \(n, 3\), and the observation is float32"),
        (same(kind=TEXT), box(3), box(3), r"takes something else than numbers"),
        (same(), PLAYER, box(3), r"it has an input each for obs, where x, y is needed"),
        (same(), box(3), PLAYER, r"an output each for out, where action\.x, action\.y is needed"),
        (same(), box(3), DiscreteSpec(2), r"returned float32 \(1, 3\) for the action; Discrete"),
        (same(), TextSpec(0, 9, ""), box(3), r"its space is text"),
        (
            model([("y", F, ["n", 1]), ("z", F, ["n", 2])], [("out", F, ["n", 1])], COPY),
            PLAYER,
            box(1),
            r"an input each for y, z, where x, y is needed",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_contract(
    made: ModelProto, observation: SpaceSpec, action: SpaceSpec, reason: str
) -> None:
    with pytest.raises(ContractMismatchError, match=reason):
        policy_of(made).check_contract(contract(observation, action))


PAIR = TupleSpec((DiscreteSpec(3, -1), MultiDiscreteSpec((2,), (1,))))
SPACES: list[SpaceSpec] = [
    DictSpec((("b", box(2, 3)), ("a", PAIR))),
    BoxSpec((2,), "float64", np.array([-np.inf, -0.1]).tobytes(), np.array([0.3, 1e9]).tobytes()),
]


@pytest.mark.parametrize("space", SPACES, ids=["nested", "bounds"])
def test_a_file_says_what_its_spaces_are(space: SpaceSpec) -> None:
    made = same()
    helper.set_model_props(made, metadata_of(space, box(3), "PPO"))

    traits = policy_of(made).traits

    assert (traits.observation_space, traits.action_space) == (space, box(3))
    assert (traits.kind, traits.algorithm) == ("ONNX", "PPO")


def test_other_spaces_than_the_files_are_refused_with_the_difference() -> None:
    made = same()
    helper.set_model_props(made, metadata_of(box(3), DiscreteSpec(3), ""))
    policy = policy_of(made)
    policy.check_contract(contract(box(3), DiscreteSpec(3)))

    with pytest.raises(ContractMismatchError, match=r"policy\.onnx was exported for other spaces"):
        policy.check_contract(contract(box(3), DiscreteSpec(4)))


def test_spaces_that_are_none_are_refused() -> None:
    made = same()
    helper.set_model_props(made, {"rlmesh_ray.observation_space": "{"})

    with pytest.raises(PolicyError, match=r"policy\.onnx has no valid spaces in its"):
        policy_of(made)


def test_a_model_without_loops_only_computes() -> None:
    assert policy_of(same()).traits.only_computes
    assert not policy_of(looping()).traits.only_computes


def looping(count: int = 2) -> ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["goes"]),
            helper.make_node("Identity", ["value"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", F, ["n", 3]),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", F, ["n", 3]),
        ],
    )
    return model(
        [("obs", F, ["n", 3])],
        [("out", F, ["n", 3])],
        helper.make_node("Loop", ["count", "", "obs"], ["out"], body=body),
        initializers=[numpy_helper.from_array(np.array(count), "count")],
    )


def test_numbers_in_another_file_are_not_read(tmp_path: Path) -> None:
    np.ones(3, np.float32).tofile(tmp_path / "weights")
    weights = TensorProto(name="w", data_type=F, dims=[3], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=str(tmp_path / "weights"))
    made = model(
        [("obs", F, ["n", 3])],
        [("out", F, ["n", 3])],
        helper.make_node("Add", ["obs", "w"], ["out"]),
        initializers=[weights],
    )

    with pytest.raises(ConfigurationError, match=r"numbers of w in another file.*save it as one"):
        policy_of(made)


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x07\x12\x07pytorch"])
def test_a_damaged_file_is_a_policy_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "policy.onnx").write_bytes(content)

    with pytest.raises(PolicyError, match=r"policy\.onnx"):
        load_policy(str(tmp_path / "policy.onnx"))


def test_operators_that_onnx_runtime_has_not_are_a_policy_error() -> None:
    node = helper.make_node("Mystery", ["obs"], ["out"], domain="elsewhere")
    made = model([("obs", F, ["n", 3])], [("out", F, ["n", 3])], node)

    with pytest.raises(PolicyError, match=r"policy\.onnx cannot be loaded by ONNX Runtime"):
        policy_of(made)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"explore": True}, "explore is for RLlib checkpoints"),
        ({"device": "cuda"}, "device cannot be used with an ONNX file, which runs in ONNX Runtime"),
        ({"buckets": [2], "inference": "torch"}, "buckets and inference cannot be used with"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "POLICY.ONNX"
    file.write_bytes(same().SerializeToString())

    with pytest.raises(ConfigurationError, match=reason):
        load_policy(str(file), **options)


def test_weights_of_a_file_cannot_be_replaced() -> None:
    assert not isinstance(policy_of(same()), UpdatablePolicy)


def test_neither_torch_nor_ray_is_needed(tmp_path: Path) -> None:
    (tmp_path / "policy.onnx").write_bytes(same().SerializeToString())
    code = f"""
        import sys
        sys.modules["torch"] = sys.modules["ray"] = None  # Importing them fails from now on.
        import numpy as np
        from rlmesh_ray.models import load_policy
        from rlmesh_ray.models.policy import RouteRows, Rows
        from rlmesh_ray.protocol.messages import PredictSlot
        from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
        from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec
        box = BoxSpec((3,), "float32", b"\\0" * 4, b"\\0" * 4)
        contract = EnvContract("Test-v0", box, DiscreteSpec(3), 1, AutoresetMode.DISABLED)
        policy = load_policy({str(tmp_path / "policy.onnx")!r})
        policy.check_contract(contract)
        rows = [RouteRows("r", [PredictSlot(0, "", 0, False)])]
        assert policy.predict(contract, Rows(np.eye(3, dtype=np.float32)[1:2], rows)) == [1]
    """

    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def chunking(*steps: int | str) -> ModelProto:
    """A model that chooses two actions at once: its input, and its negation."""
    nodes = (
        helper.make_node("Neg", ["obs"], ["later"]),
        helper.make_node("Unsqueeze", ["obs", "axis"], ["first"]),
        helper.make_node("Unsqueeze", ["later", "axis"], ["second"]),
        helper.make_node("Concat", ["first", "second"], ["out"], axis=1),
    )
    axis = numpy_helper.from_array(np.array([1]), "axis")
    return model([("obs", F, ["n", 3])], [("out", F, steps)], *nodes, initializers=[axis])


def test_a_model_may_choose_several_actions_at_once(tmp_path: Path) -> None:
    file = tmp_path / "policy.onnx"
    file.write_bytes(chunking("n", 2, 3).SerializeToString())
    policy: Any = load_policy(str(file), horizon=2)

    actions = act(policy, contract(box(3), box(3)), OBSERVATIONS, 5)
    choices = act(policy, contract(box(3), DiscreteSpec(3)), OBSERVATIONS, 5)

    assert policy.traits.horizon == 2
    assert np.array_equal(actions, np.stack([OBSERVATIONS, -OBSERVATIONS], axis=1))
    assert np.array_equal(choices[:, 0], OBSERVATIONS.argmax(axis=1))


@pytest.mark.parametrize(("made", "horizon"), [(same(), 2), (chunking("n", 2, 3), 1)])
def test_another_horizon_than_the_model_s_is_refused_before_it_acts(
    made: ModelProto, horizon: int
) -> None:
    policy = OnnxFilePolicy(made.SerializeToString(), "policy.onnx", horizon=horizon)

    with pytest.raises(ContractMismatchError, match="the module returned float32"):
        policy.check_contract(contract(box(3), box(3)))


def test_integers_that_the_model_s_input_cannot_hold_are_refused() -> None:
    made = model(
        [("obs", TensorProto.INT8, ["n", 3])],
        [("out", F, ["n", 3])],
        helper.make_node("Cast", ["obs"], ["out"], to=F),
    )
    numbers = MultiDiscreteSpec((1000, 1000, 1000), (3,))
    policy, of_env = policy_of(made), contract(numbers, box(3))

    assert act(policy, of_env, np.full((1, 3), 100), 1).tolist() == [[100.0] * 3]
    with pytest.raises(PolicyError, match=r"takes int8, which the observation exceeds"):
        act(policy, of_env, np.full((1, 3), 300), 1)


def test_a_float_that_the_model_s_input_cannot_hold_is_refused() -> None:
    doubles = BoxSpec((3,), "float64", np.float64(-np.inf).tobytes(), np.float64(np.inf).tobytes())
    policy, of_env = policy_of(same()), contract(doubles, box(3))

    observed = np.array([[1.0, np.inf, -2.0]])
    assert act(policy, of_env, observed, 1).tolist() == observed.tolist()
    with pytest.raises(PolicyError, match=r"takes float32, which the observation exceeds"):
        act(policy, of_env, np.array([[1.0, 1e300, -2.0]]), 1)


def test_a_model_of_no_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.onnx has inputs of \['0'\] rows"):
        policy_of(same(rows=0))
