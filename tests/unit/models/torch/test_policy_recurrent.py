import gc
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, UpdatablePolicy
from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec

BOX = BoxSpec((1,), "float32", np.zeros(1, "f4").tobytes(), np.ones(1, "f4").tobytes())
CONTRACT = EnvContract("Test-v0", BOX, BOX, 4, AutoresetMode.DISABLED)


class Sum(torch.nn.Module):
    """Acts with the sum of what it has seen in the episode, counted from ``start``."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.zeros(1))
        self.sizes: list[int] = []
        self.steps: list[list[int]] = []

    def initial_state(self) -> Any:
        return {"sum": self.start, "steps": (torch.zeros((), dtype=torch.int64),)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        self.sizes.append(len(x))
        self.steps.append(state["steps"][0].tolist())
        if bool((x == 99).any()):
            raise ZeroDivisionError("99")
        total = state["sum"] + x
        return total, {"sum": total, "steps": (state["steps"][0] + 1,)}


class Cell(torch.nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(1, 8)
        self.head = torch.nn.Linear(8, 1)

    def initial_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(8), torch.zeros(8)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden, memory = self.cell(x, state)
        return self.head(hidden), (hidden, memory)


class WideSum(torch.nn.Module):
    """Acts with the sum of what it has seen; its states are known by their width."""

    width = 1000

    def initial_state(self) -> torch.Tensor:
        return torch.zeros(self.width)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        total = state + x
        return total[:, :1], total


@pytest.fixture(name="wide")
def _wide() -> RecurrentTorchPolicy:
    WideSum.width += 1  # former policies may not have been collected yet
    return RecurrentTorchPolicy(WideSum())


def num_states() -> int:
    """Return for how many lanes' states of ``WideSum`` there is memory now."""
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
    return sum(len(each) for each in tensors if each.shape[1:] == (WideSum.width,))


def act(
    policy: Policy, values: list[float], slots: list[PredictSlot] | None = None, route: str = "r"
) -> list[float]:
    slots = slots or [PredictSlot(lane, "", 0, reset=False) for lane in range(len(values))]
    observations = np.array(values, np.float32)[:, None]
    observations.flags.writeable = False
    actions = policy.predict(CONTRACT, Rows(observations, [RouteRows(route, slots)]))
    return [float(action) for action in np.asarray(actions)[:, 0]]


@pytest.fixture
def policy() -> RecurrentTorchPolicy:
    return RecurrentTorchPolicy(Sum())


def test_a_module_with_an_initial_state_becomes_a_recurrent_policy() -> None:
    policy = as_policy(Sum())

    assert isinstance(policy, RecurrentTorchPolicy)
    assert isinstance(policy, Policy)
    assert isinstance(policy, UpdatablePolicy)


def test_each_lane_has_a_state_of_its_own(policy: RecurrentTorchPolicy) -> None:
    assert act(policy, [1, 10]) == [1, 10]
    assert act(policy, [1, 10]) == [2, 20]
    assert act(policy, [5], route="other") == [5]
    assert act(policy, [1, 10]) == [3, 30]


def test_a_reset_and_another_episode_begin_anew(policy: RecurrentTorchPolicy) -> None:
    act(policy, [1, 10], [PredictSlot(0, "a", 0, True), PredictSlot(1, "b", 0, True)])

    after = act(policy, [1, 10], [PredictSlot(0, "a", 1, False), PredictSlot(1, "c", 0, False)])
    at_last = act(policy, [1, 10], [PredictSlot(0, "a", 0, True), PredictSlot(1, "c", 1, False)])

    assert after == [2, 10]
    assert at_last == [1, 20]


def test_a_forgotten_lane_begins_anew_and_does_not_disturb_other_lanes(
    policy: RecurrentTorchPolicy,
) -> None:
    act(policy, [1, 10, 100])

    policy.forget("r", 1)

    assert act(policy, [1, 10, 100]) == [2, 10, 200]
    policy.forget("r", None)
    assert act(policy, [1, 10, 100]) == [1, 10, 100]


def test_an_lstm_acts_on_batches_as_it_does_on_each_lane_alone() -> None:
    torch.manual_seed(0)
    module = Cell()
    policy = RecurrentTorchPolicy(module)
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)

    served = [act(policy, list(step)) for step in values]

    for lane in range(4):
        state = tuple(leaf[None] for leaf in module.initial_state())
        for step, value in enumerate(values[:, lane]):
            with torch.no_grad():
                output, state = module(torch.tensor([[value]]), state)
            # Sums of a batch are added in another order than those of one row.
            assert served[step][lane] == pytest.approx(output.item(), abs=1e-6)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
def test_torchscript_can_be_recurrent_too() -> None:
    class Scripted(torch.nn.Module):
        @torch.jit.export
        def initial_state(self) -> torch.Tensor:
            return torch.zeros(1)

        def forward(
            self, x: torch.Tensor, state: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return state + x, state + x

    policy = as_policy(torch.jit.script(Scripted()))

    assert act(policy, [1, 10]) == [1, 10]
    assert act(policy, [1, 10]) == [2, 20]


# --- buckets ---------------------------------------------------------------------------


def test_padding_touches_no_state() -> None:
    module = Sum()
    policy = RecurrentTorchPolicy(module, buckets=[2, 4])

    assert act(policy, [1, 10, 100]) == [1, 10, 100]
    assert act(policy, [1, 10, 100, 1000]) == [2, 20, 200, 1000]
    # Lane 3 is not in this batch; padding stands where it stood.
    assert act(policy, [1, 10, 100]) == [3, 30, 300]
    assert act(policy, [1, 10, 100, 1000]) == [4, 40, 400, 2000]
    assert set(module.sizes) == {4}
    assert module.steps[2] == [2, 2, 2, 0]


def test_a_batch_above_the_largest_bucket_keeps_each_lane_s_state() -> None:
    module = Sum()
    policy = RecurrentTorchPolicy(module, buckets=[2])

    assert act(policy, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    assert act(policy, [1, 2, 3, 4, 5]) == [2, 4, 6, 8, 10]
    assert module.sizes == [2] * 6


# --- failures --------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [[], [2]])
def test_a_failed_batch_leaves_the_states_as_they_were(buckets: list[int]) -> None:
    policy = RecurrentTorchPolicy(Sum(), buckets=buckets)
    act(policy, [1, 10, 100])

    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        act(policy, [1, 10, 99])

    assert act(policy, [1, 10, 100]) == [2, 20, 200]


def test_a_lane_twice_in_one_batch_is_refused(policy: RecurrentTorchPolicy) -> None:
    with pytest.raises(PolicyError, match="a lane occurs twice"):
        act(policy, [1, 2], [PredictSlot(0, "", 0, False)] * 2)


class Returns(torch.nn.Module):
    def __init__(self, initial: Any, returned: Any) -> None:
        super().__init__()
        self.initial = initial
        self.returned = returned

    def initial_state(self) -> Any:
        if isinstance(self.initial, Exception):
            raise self.initial
        return self.initial

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("initial", "error", "message"),
    [
        (None, ConfigurationError, "returned NoneType; it must be a tensor, or a dict or tuple"),
        ({}, ConfigurationError, "it must be a tensor"),
        ({"h": [torch.zeros(1)]}, ConfigurationError, r"returned list; it must be a tensor"),
        (ValueError("no"), PolicyError, r"initial_state\(\) raised ValueError: no"),
    ],
)
def test_an_initial_state_that_is_none_is_refused(
    initial: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RecurrentTorchPolicy(Returns(initial, None))


X = torch.zeros(1, 1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (X, r"must return \(outputs, state\), not a Tensor"),
        ((X, None), r"returned the state NoneType for 1 rows, but initial_state\(\)"),
        ((X, X), r"returned the state float32 \(1, 1\)"),
        ((X, {"c": X}), "put one batch dimension first"),
        ((X, {"h": X[0]}), r"\{h: float32 \(1,\)\} for 1 rows, .* is \{h: float32 \(1,\)\}"),
        ((X, {"h": X.double()}), r"float64 \(1, 1\)"),
        ((torch.zeros(1, 2), {"h": X}), r"float32 \(1, 2\) for the action"),
    ],
)
def test_what_forward_must_return_is_checked_with_the_contract(returned: Any, message: str) -> None:
    policy = RecurrentTorchPolicy(Returns({"h": torch.zeros(1)}, returned))

    with pytest.raises(ContractMismatchError, match=message):
        policy.check_contract(CONTRACT)
    with pytest.raises(PolicyError, match=message):
        act(policy, [1])


def test_checking_a_contract_leaves_nothing_behind(wide: RecurrentTorchPolicy) -> None:
    for _ in range(100):
        wide.check_contract(CONTRACT)

    assert act(wide, [1, 10]) == [1, 10]
    assert num_states() == 16


# --- what is remembered, and for how long ----------------------------------------------


def test_nothing_grows_over_ten_thousand_episodes(wide: RecurrentTorchPolicy) -> None:
    for number in range(5000):
        slots = [PredictSlot(lane, f"{number}/{lane}", 0, reset=number % 2 == 0) for lane in (0, 1)]
        assert act(wide, [1, 10], slots) == [1, 10]

    assert num_states() == 16


def test_the_memory_of_many_lanes_is_given_back_with_the_last_of_them(
    wide: RecurrentTorchPolicy,
) -> None:
    act(wide, [1] * 100, route="wide")
    act(wide, [1, 10], route="narrow")
    wide.forget("wide", None)

    assert act(wide, [1, 10], route="narrow") == [2, 20]
    assert num_states() == 128
    wide.forget("narrow", None)
    assert num_states() == 16
    assert act(wide, [1, 10], route="narrow") == [1, 10]


def test_nothing_is_left_of_routes_that_were_closed(wide: RecurrentTorchPolicy) -> None:
    for number in range(3000):
        # A vanished client's routes are forgotten as closed ones are.
        act(wide, [1, 10], route=f"{number}")
        wide.forget(f"{number}", None)
        wide.forget(f"{number}", None)

    assert num_states() == 16


def test_many_lanes_at_once_find_room_and_keep_their_states(wide: RecurrentTorchPolicy) -> None:
    act(wide, [7.0])
    values = [float(value) for value in range(100, 200)]

    first = act(wide, values, route="wide")
    second = act(wide, values, route="wide")

    assert (first, second) == (values, [2 * value for value in values])
    assert act(wide, [7.0]) == [14.0]
    assert num_states() == 128


# --- new weights -----------------------------------------------------------------------


def test_new_weights_act_at_once_and_running_episodes_keep_their_states(
    policy: RecurrentTorchPolicy,
) -> None:
    act(policy, [1, 10])

    policy.set_weights({"start": np.array([1000.0], np.float32)})
    running_and_new = act(
        policy, [1, 10], [PredictSlot(0, "", 1, False), PredictSlot(1, "", 0, True)]
    )

    assert running_and_new == [2, 1010]
    assert policy.get_weights() == {"start": np.array([1000.0], np.float32)}


@pytest.mark.parametrize("buckets", [(), (2,)])
def test_a_request_with_nan_keeps_the_states_of_its_lanes_and_other_requests_advance(
    buckets: tuple[int, ...],
) -> None:
    policy = RecurrentTorchPolicy(Sum(), buckets=buckets)
    two, one = slots_of(2), slots_of(1)
    shared = [RouteRows("good", one), RouteRows("bad", two), RouteRows("other", one)]
    observations = np.array([[1.0], [np.nan], [1.0], [1.0]], np.float32)

    policy.predict(CONTRACT, Rows(np.ones((4, 1), np.float32), shared))
    policy.predict(CONTRACT, Rows(observations, shared))
    actions = policy.predict(CONTRACT, Rows(np.ones((4, 1), np.float32), shared))

    assert np.asarray(actions)[:, 0].tolist() == [3.0, 2.0, 2.0, 3.0]


def slots_of(count: int) -> list[PredictSlot]:
    return [PredictSlot(lane, "", 0, reset=False) for lane in range(count)]
