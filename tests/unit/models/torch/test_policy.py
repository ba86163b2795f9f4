import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.actions import BatchBuckets
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, UpdatablePolicy
from rlmesh_ray.models.torch.module import compiled
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)


def box(*shape: int, dtype: str = "float32") -> BoxSpec:
    return BoxSpec(shape, dtype, np.zeros(shape, dtype).tobytes(), np.ones(shape, dtype).tobytes())


def contract(observations: SpaceSpec, actions: SpaceSpec) -> EnvContract:
    return EnvContract("Test-v0", observations, actions, 2, AutoresetMode.DISABLED)


def rows(observations: object, num_rows: int) -> Rows:
    slots = [PredictSlot(lane, "", 0, False) for lane in range(num_rows)]
    return Rows(observations, [RouteRows("r", slots)])


class Answer(torch.nn.Module):
    """Remembers what it is given and answers the same each time."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.given: Any = None
        self.was_training = True
        self.was_inference = False

    def forward(self, observations: Any) -> Any:
        self.given = observations
        self.was_training = self.training
        self.was_inference = torch.is_inference_mode_enabled()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def act(answer: Any, actions: SpaceSpec) -> Any:
    policy = TorchPolicy(Answer(answer))
    observations = np.zeros((2, 3), np.float32)
    return policy.predict(contract(box(3), actions), rows(observations, 2))


def test_the_largest_logit_wins_and_start_is_added() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.0], [2.0, 0.0, 1.0]])

    assert np.array_equal(act(logits, DiscreteSpec(3, start=5)), [6, 5])


def test_integers_for_a_discrete_space_are_the_actions_themselves() -> None:
    assert np.array_equal(act(torch.tensor([7, 5]), DiscreteSpec(3, start=5)), [7, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_box_actions_are_left_as_they_are(dtype: torch.dtype) -> None:
    actions = act(torch.tensor([[0.5, 9.0], [-1.0, 0.0]], dtype=dtype), box(2))

    assert np.array_equal(actions, [[0.5, 9.0], [-1.0, 0.0]])


def test_integer_leaves_take_integers() -> None:
    spec = DictSpec((("b", MultiBinarySpec(2)), ("a", MultiDiscreteSpec((3, 4), (2,)))))
    answer = {"a": torch.tensor([[1, 2], [0, 3]]), "b": torch.tensor([[1, 0], [0, 0]])}

    actions = act(answer, spec)

    assert list(actions) == ["b", "a"]
    assert np.array_equal(actions["a"], [[1, 2], [0, 3]])
    assert np.array_equal(actions["b"], [[1, 0], [0, 0]])


def test_each_leaf_of_a_composite_space_is_read_by_its_own_rule() -> None:
    answer = (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5], [0.25]]))

    discrete, continuous = act(answer, TupleSpec((DiscreteSpec(2), box(1))))

    assert np.array_equal(discrete, [1, 0])
    assert np.array_equal(continuous, [[0.5], [0.25]])


def test_the_module_gets_tensors_of_the_declared_dtypes_in_the_space_s_structure() -> None:
    module = Answer(torch.tensor([0, 0]))
    space = DictSpec((("p", TupleSpec((box(2), DiscreteSpec(4)))), ("q", box(1, dtype="uint8"))))
    observations = {
        "p": (np.ones((2, 2), np.float32), np.array([1, 2])),
        "q": np.array([[3], [4]], np.uint8),
    }

    TorchPolicy(module).predict(contract(space, DiscreteSpec(2)), rows(observations, 2))

    first, second = module.given["p"]
    assert (first.dtype, second.dtype) == (torch.float32, torch.int64)
    assert torch.equal(module.given["q"], torch.tensor([[3], [4]], dtype=torch.uint8))


def test_the_module_runs_in_evaluation_mode_and_without_gradients() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(1.0), last := Answer(torch.tensor([0])))

    TorchPolicy(module).predict(
        contract(box(3), DiscreteSpec(2)), rows(np.ones((1, 3), np.float32), 1)
    )

    assert not last.was_training
    assert last.was_inference
    assert torch.equal(last.given, torch.ones(1, 3))


def test_read_only_and_strided_observations_are_taken() -> None:
    module = Answer(torch.tensor([0, 0]))
    observations = np.arange(6, dtype=np.float32).reshape(2, 3)[::-1]
    observations.flags.writeable = False

    TorchPolicy(module).predict(contract(box(3), DiscreteSpec(2)), rows(observations, 2))

    assert np.array_equal(module.given.numpy(), observations)


@pytest.mark.parametrize(
    ("answer", "actions", "message"),
    [
        (torch.zeros(2, 4), DiscreteSpec(3), r"float32 \(2, 4\) .* logits \(2, 3\) or integer"),
        (torch.zeros(2), DiscreteSpec(3), r"float32 \(2,\) .* integer actions \(2,\)"),
        (torch.zeros(2, 1, dtype=torch.int64), DiscreteSpec(3), r"int64 \(2, 1\)"),
        (torch.zeros(2, 4), box(3), r"float32 \(2, 4\) for the action; Box takes .*\(2, 3\)"),
        (torch.zeros(1, 3), box(3), r"\(1, 3\) .* actions \(2, 3\)"),
        (torch.zeros(2, 2), MultiBinarySpec(2), r"MultiBinary takes integer actions \(2, 2\)"),
        (torch.full((2, 3), torch.nan), DiscreteSpec(3), "NaN"),
        ([0, 1], DiscreteSpec(3), "returned a list where a tensor"),
        (torch.zeros(2, 1), DictSpec((("steer", box(1)),)), "structure of the action space"),
        ({"steer": torch.zeros(2, 2)}, DictSpec((("steer", box(1)),)), r"\(2, 2\) for steer"),
        (ZeroDivisionError("speed"), box(1), r"ZeroDivisionError on .*float32 \(2, 3\): speed"),
    ],
)
def test_output_that_fits_no_rule_is_refused(answer: Any, actions: SpaceSpec, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        act(answer, actions)


def test_a_module_that_fits_the_spaces_is_accepted() -> None:
    policy = TorchPolicy(torch.nn.Linear(3, 2))

    policy.check_contract(contract(box(3), DiscreteSpec(2)))
    policy.check_contract(contract(box(3), box(2)))
    policy.forget("r", None)

    assert isinstance(policy, Policy)


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (box(4), DiscreteSpec(2), r"Test-v0: the module raised .* float32 \(1, 4\)"),
        (box(3, dtype="float64"), DiscreteSpec(2), r"float64 \(1, 3\)"),
        (box(3), DiscreteSpec(3), r"Test-v0: .* float32 \(1, 2\) .* logits \(1, 3\)"),
        (DictSpec((("say", TextSpec(0, 5, "")),)), DiscreteSpec(2), "say is text"),
        (box(3), TextSpec(0, 5, ""), "is text"),
    ],
)
def test_a_module_that_cannot_act_there_is_refused_when_the_route_is_configured(
    observations: SpaceSpec, actions: SpaceSpec, message: str
) -> None:
    policy = TorchPolicy(torch.nn.Linear(3, 2))

    with pytest.raises(ContractMismatchError, match=message):
        policy.check_contract(contract(observations, actions))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(2).to_sparse(), "Sparse layout"),
        (torch.zeros(2, device="meta"), "cannot be actions"),
    ],
)
def test_output_that_could_never_be_actions_is_found_out_when_the_route_is_configured(
    answer: torch.Tensor, message: str
) -> None:
    one_lane = replace(contract(box(3), box(2, dtype="int32")), num_envs=1)

    with pytest.raises(ContractMismatchError, match=message):
        TorchPolicy(Answer(answer[None])).check_contract(one_lane)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -1.0, -1])
def test_a_module_is_not_refused_for_numbers_that_it_makes_of_zeros(value: float) -> None:
    answer = torch.nn.Parameter(torch.full((1, 2), value), requires_grad=isinstance(value, float))
    one_lane = replace(contract(box(3), box(2, dtype="uint8")), num_envs=1)

    TorchPolicy(Answer(answer)).check_contract(one_lane)


def test_a_module_that_makes_nan_of_zeros_is_not_refused_for_it() -> None:
    class Normalise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.square().sum(1, keepdim=True)

    TorchPolicy(Normalise()).check_contract(contract(box(2), box(2)))


def test_other_rows_of_a_batch_get_actions_although_one_row_s_logits_are_nan() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [2.0, 0.0, 1.0]])

    actions = act(logits, DiscreteSpec(3, start=5))

    # 8 is outside the space: the server's check refuses that row.
    assert np.array_equal(actions, [8, 5])


# --- buckets ---------------------------------------------------------------------------


class Sizes(torch.nn.Module):
    """Sums the features of each row, and writes down how many rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        self.sizes.append(len(x["p"]))
        return x["p"].sum(1, keepdim=True) + x["q"][:, None]


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(1, [2]), (2, [2]), (3, [4]), (4, [4]), (5, [4, 2]), (11, [4, 4, 4])]
)
def test_the_module_gets_bucket_sizes_only_and_padding_gives_no_actions(
    num_rows: int, sizes: list[int]
) -> None:
    module = Sizes()
    space = DictSpec((("p", box(3)), ("q", DiscreteSpec(99))))
    observations: dict[str, Any] = {
        "p": np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3),
        "q": np.arange(num_rows),
    }
    for array in observations.values():
        array.flags.writeable = False

    policy = TorchPolicy(module, buckets=[2, 4])
    actions = policy.predict(contract(space, box(1)), rows(observations, num_rows))

    assert module.sizes == sizes
    expected = observations["p"].sum(1) + observations["q"]
    assert np.array_equal(np.asarray(actions)[:, 0], expected)


def test_a_contract_is_tried_with_a_size_of_the_buckets() -> None:
    module = Sizes()

    policy = TorchPolicy(module, buckets=[3, 8])
    policy.check_contract(contract(DictSpec((("p", box(3)), ("q", DiscreteSpec(9)))), box(1)))

    assert module.sizes == [3]


class OneRow(torch.nn.Module):
    """Takes what it was exported for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum().reshape(1, 1)


def test_what_takes_one_row_only_is_found_out_where_there_may_be_several() -> None:
    of_two = contract(box(3), box(1))
    of_one = replace(of_two, num_envs=1)

    with pytest.raises(
        ContractMismatchError, match=r"actions \(2, 1\); it works with one row: .*bucket"
    ):
        TorchPolicy(OneRow()).check_contract(of_two)
    TorchPolicy(OneRow()).check_contract(of_one)
    TorchPolicy(OneRow(), buckets=[1]).check_contract(of_two)


def test_a_row_s_action_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    policy, of_env = TorchPolicy(module, buckets=[4]), contract(box(3), box(2))
    observations = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)

    together = np.asarray(policy.predict(of_env, rows(observations, 4)))
    alone = [np.asarray(policy.predict(of_env, rows(row[None], 1)))[0] for row in observations]

    # The same size each time: the same sums in the same order.
    assert np.array_equal(together, alone)


# --- device and compilation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", r"device=cuda is not available.*use one of \['cpu'\]"),
        ("cuda:7", "device=cuda:7 is not available"),
        ("meta", "cannot run policies"),
        ("gpu", "device=gpu cannot run policies; available are"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_a_remedy(device: str, message: str) -> None:
    if device != "meta" and torch.cuda.is_available():
        pytest.skip("a GPU is there")

    with pytest.raises(ConfigurationError, match=message):
        TorchPolicy(torch.nn.Linear(3, 2), device=device)


def test_a_module_stays_where_it_is_unless_a_device_is_named() -> None:
    elsewhere = torch.nn.Linear(3, 2, device="meta", dtype=torch.float64)

    TorchPolicy(elsewhere)
    TorchPolicy(here := torch.nn.Linear(3, 2), device="cpu")

    assert elsewhere.weight.device.type == "meta"
    assert here.weight.device.type == "cpu"


def test_more_buckets_than_torch_compiles_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="9 buckets are more than torch compiles"):
        compiled(torch.nn.Linear(3, 2), torch.device("cuda"), BatchBuckets(range(1, 10)))


# --- new weights -----------------------------------------------------------------------


def test_weights_are_replaced_in_place_by_arrays_and_by_tensors() -> None:
    module = torch.nn.Linear(3, 2)
    policy, addresses = TorchPolicy(module), [p.data_ptr() for p in module.parameters()]
    assert isinstance(policy, UpdatablePolicy)

    before = policy.get_weights()
    policy.set_weights({"weight": np.ones((2, 3), np.float32), "bias": torch.tensor([0.0, 1.0])})
    actions = policy.predict(contract(box(3), box(2)), rows(np.ones((1, 3), np.float32), 1))

    assert np.array_equal(np.asarray(actions), [[3.0, 4.0]])
    assert not np.array_equal(before["weight"], np.ones((2, 3)))
    assert [p.data_ptr() for p in module.parameters()] == addresses
    policy.set_weights(before)
    assert np.array_equal(policy.get_weights()["weight"], before["weight"])


def test_read_only_strided_and_swapped_arrays_and_half_floats_are_weights_too() -> None:
    module = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    policy = TorchPolicy(torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": module}))
    flipped = np.arange(6, dtype=">f4").reshape(2, 3)[:, ::-1]
    flipped.flags.writeable = False

    policy.set_weights(policy.get_weights() | {"a.weight": flipped})

    assert np.array_equal(policy.get_weights()["a.weight"], flipped)
    assert policy.get_weights()["b.weight"].dtype is torch.bfloat16


class Odd(torch.nn.Parameter):
    """Raises when it is copied from, as tensors of other classes may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise RuntimeError("not here")
        return super().__torch_function__(func, types, args, kwargs or {})


W, B = np.ones((2, 3), np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": W}, "missing are bias, unknown are none"),
        ({"weight": W, "bias": B, "scale": B}, "missing are none, unknown are scale"),
        ({"weight": W, "bias": np.ones(3, np.float32)}, r"bias is float32 \(3,\), .* \(2,\)"),
        ({"weight": W, "bias": np.ones(2)}, r"bias is float64 \(2,\), but .*float32"),
        ({"weight": W, "bias": [1.0, 1.0]}, "neither an array of numbers nor a tensor"),
        ({"weight": W, "bias": np.array(["a", "b"])}, "neither an array of numbers"),
        ({"weight": W, "bias": np.ones(2, np.longdouble)}, "neither an array of numbers"),
        ({"weight": W, "bias": torch.ones(2, device="meta")}, "bias is a Tensor .*on meta.*dense"),
        ({"weight": W, "bias": torch.ones(2).to_sparse()}, r"bias is a Tensor \(torch.sparse_coo"),
        ({"weight": W, "bias": Odd(torch.ones(2))}, "bias is a Odd .*give a plain dense tensor"),
        ([W, B], "a mapping of names to arrays.*not a list"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(
    weights: object, message: str
) -> None:
    policy = TorchPolicy(torch.nn.Linear(3, 2))
    before = policy.get_weights()

    with pytest.raises(PolicyError, match=message):
        policy.set_weights(weights)

    after = policy.get_weights()
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_an_exported_program_acts_on_any_number_of_rows() -> None:
    module = torch.nn.Linear(3, 2)
    program = torch.export.export(
        module, (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    of_env = contract(box(3), DiscreteSpec(2))

    actions = TorchPolicy(program.module()).predict(of_env, rows(observations, 5))

    assert np.array_equal(
        np.asarray(actions), module(torch.from_numpy(observations)).argmax(1).numpy()
    )


# --- chunks ----------------------------------------------------------------------------


def test_a_module_of_several_actions_at_once_has_an_axis_for_them() -> None:
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]).expand(2, 3, 2)
    space = TupleSpec((DiscreteSpec(2, start=5), DiscreteSpec(4), box(2)))
    answer = logits, torch.ones(2, 3, dtype=torch.int64), torch.full((2, 3, 2), 0.5)
    policy = TorchPolicy(Answer(answer), horizon=3)

    found: Any = policy.predict(contract(box(3), space), rows(np.zeros((2, 3), np.float32), 2))

    assert policy.traits.horizon == 3
    assert [each.shape for each in found] == [(2, 3), (2, 3), (2, 3, 2)]
    assert found[0].tolist() == [[6, 5, 6]] * 2


def test_a_step_whose_logits_are_nan_gets_an_action_outside_of_the_space() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[1, 2, 0] = math.nan
    policy = TorchPolicy(Answer(logits), horizon=3)

    found: Any = policy.predict(
        contract(box(3), DiscreteSpec(4)), rows(np.zeros((2, 3), np.float32), 2)
    )

    assert found.tolist() == [[0, 0, 0], [0, 0, 4]]


@pytest.mark.parametrize(
    ("actions", "answer", "wanted"),
    [
        (
            box(2),
            torch.zeros(1, 2),
            r"float32 \(1, 2\).*actions \(1, 3, 2\) \(rows, horizon=3, …\)",
        ),
        (box(2), torch.zeros(1, 4, 2), r"float32 \(1, 4, 2\).*actions \(1, 3, 2\)"),
        (DiscreteSpec(2), torch.zeros(1, 2), r"logits \(1, 3, 2\) or integer actions \(1, 3\)"),
    ],
)
def test_a_contract_shows_whether_the_module_returns_chunks(
    actions: SpaceSpec, answer: Any, wanted: str
) -> None:
    policy = TorchPolicy(Answer(answer), horizon=3)

    with pytest.raises(ContractMismatchError, match=wanted):
        policy.check_contract(replace(contract(box(3), actions), num_envs=1))


def test_auto_elsewhere_than_on_a_cpu_is_torch() -> None:
    policy = TorchPolicy(torch.nn.Linear(3, 3, device="meta"), inference="auto")

    torch_reason = policy.traits.torch_reason

    assert torch_reason is not None
    assert torch_reason() == 'inference="auto" is torch on meta'
