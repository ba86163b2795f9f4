from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ContractMismatchError, PolicyError
from rlmesh_ray.models.policy import Policy, RouteRows, Rows
from rlmesh_ray.models.torch_policy import TorchPolicy
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

    def forward(self, observations: Any) -> Any:
        self.given = observations
        self.was_training = self.training
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
    assert last.given.is_inference()
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


def test_a_module_that_makes_nan_of_zeros_is_not_refused_for_it() -> None:
    class Normalise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.square().sum(1, keepdim=True)

    TorchPolicy(Normalise()).check_contract(contract(box(2), box(2)))


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
