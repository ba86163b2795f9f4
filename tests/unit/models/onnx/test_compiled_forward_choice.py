"""The choice between torch and a compiled module, and what it says about it."""

import logging
import pickle
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.compiled_forward import InferenceChoice
from rlmesh_ray.models.rllib.forward import CompiledModule

ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class Actor(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 3)

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS])}


class Noisy(Actor):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS]) + torch.rand(3)}


class Choice:
    """A choice for a module, and what torch returned."""

    def __init__(self, inference: str, kind: type[TorchRLModule] = Actor) -> None:
        spec = RLModuleSpec(
            module_class=kind,
            observation_space=gymnasium.spaces.Box(-1, 1, (4,)),
            action_space=gymnasium.spaces.Discrete(3),
        )
        torch.manual_seed(1)
        self.module: Any = spec.build()
        self.choice = InferenceChoice(
            inference,
            lambda rows, t: CompiledModule(self.module, rows, t, explore=True, seed=1),
        )
        self.outputs: list[Any] = []

    def run(self, rows: NDArray[Any] = ROWS) -> Any:
        return self.choice.run(self._in_torch, rows, 0)

    def _in_torch(self, rows: NDArray[Any], t: int) -> Any:
        with torch.no_grad():
            inputs = self.module.forward_exploration({Columns.OBS: torch.from_numpy(rows)})
        outputs = {name: values.numpy() for name, values in inputs.items()}
        self.outputs.append(outputs)
        return outputs

    def is_torchs(self, output: Any) -> bool:
        return any(output is each for each in self.outputs)


def test_torch_runs_all_batches_if_it_was_asked_for() -> None:
    case = Choice("torch")

    outputs = [case.run() for _ in range(12)]

    assert all(map(case.is_torchs, outputs))
    assert case.choice.torch_reason() == 'inference="torch" says so'


def test_compiled_runs_all_batches_if_it_was_asked_for() -> None:
    case = Choice("compiled")

    output = case.run()

    assert not case.outputs
    assert case.choice.torch_reason() is None
    assert output.keys() == {
        Columns.ACTIONS,
        Columns.ACTION_LOGP,
        Columns.ACTION_DIST_INPUTS,
    }


def test_auto_runs_all_batches_compiled_where_that_is_possible(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Choice("auto")
    assert case.choice.torch_reason() == "the first batch decides"

    with caplog.at_level(logging.INFO, "rlmesh_ray.models"):
        for _ in range(3):
            case.run()

    assert not case.outputs
    assert case.choice.torch_reason() is None
    assert [record.getMessage() for record in caplog.records] == ["the module runs compiled"]


def test_auto_stays_with_torch_where_a_module_cannot_be_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Choice("auto", Noisy)

    with caplog.at_level(logging.INFO, "rlmesh_ray.models"):
        assert case.is_torchs(case.run())
        assert case.is_torchs(case.run())
    assert "Noisy computes something else when it is compiled" in str(case.choice.torch_reason())
    (record,) = caplog.records
    assert record.getMessage() == f"the module runs in torch: {case.choice.torch_reason()}"


def test_compiled_that_is_impossible_is_an_error_with_a_remedy() -> None:
    case = Choice("compiled", Noisy)

    with pytest.raises(ConfigurationError, match=r'Noisy computes .*; use "auto" or "torch"'):
        case.run()


def test_new_weights_act_from_the_next_call_on() -> None:
    case = Choice("compiled")
    before = case.run()[Columns.ACTION_DIST_INPUTS]

    with torch.no_grad():
        case.module.net.bias.add_(1)
    case.choice.load()

    assert np.allclose(case.run()[Columns.ACTION_DIST_INPUTS], before + 1, atol=1e-5)


def test_hooks_that_come_later_bring_torch_back() -> None:
    case = Choice("auto")
    case.run()

    case.module.net.register_forward_hook(lambda *_: None)
    case.choice.load()

    assert case.is_torchs(case.run())
    assert case.choice.torch_reason() == "Actor has hooks"


def test_numbers_that_no_action_can_be_drawn_from_are_torchs_to_refuse() -> None:
    case = Choice("compiled")

    assert case.is_torchs(case.run(np.full_like(ROWS, np.nan)))


def test_what_is_left_to_torch_is_said_until_a_batch_runs_compiled() -> None:
    case = Choice("compiled")
    reasons = []

    for rows in (ROWS, np.full_like(ROWS, np.nan), ROWS):
        case.run(rows)
        reasons.append(case.choice.torch_reason())

    assert reasons[::2] == [None, None]
    assert "the last batch was left to torch" in str(reasons[1])


class Failing:
    """A compiled module that fails when it runs."""

    def run(self, *batch: Any) -> Any:
        raise NotImplementedError("no kernel for Conv\nwith more lines")

    def load(self) -> None:
        """Do nothing."""


def unknown(*batch: Any) -> Failing:
    raise TypeError("BFloat16")


@pytest.mark.parametrize(
    ("compile", "reason"),
    [
        (unknown, "it fails in ONNX Runtime: TypeError: BFloat16"),
        (lambda *batch: Failing(), "it fails in ONNX Runtime: NotImplementedError: no kernel for"),
    ],
    ids=["when it is compiled", "when it runs"],
)
def test_auto_stays_with_torch_whatever_a_compiled_module_raises(compile: Any, reason: str) -> None:
    choice = InferenceChoice("auto", compile)

    assert choice.run(lambda rows: rows + 1, 4) == 5
    assert reason in str(choice.torch_reason())
    assert choice.run(lambda rows: rows + 1, 4) == 5


def test_compiled_says_what_was_raised_and_compiles_again_with_new_weights_only() -> None:
    asked: list[Any] = []

    def compile(rows: Any) -> Any:
        asked.append(rows)
        return unknown(rows)

    choice = InferenceChoice("compiled", compile)

    for rows in (1, 2):
        with pytest.raises(ConfigurationError, match=r"is impossible: .*TypeError: BFloat16; use"):
            choice.run(unknown, rows)
    assert asked == [1]
    assert choice.torch_reason() == choice.refusal != ""

    choice.load()
    with pytest.raises(ConfigurationError, match="BFloat16"):
        choice.run(unknown, 3)
    assert asked == [1, 3]


class Stale(Failing):
    """A compiled module that cannot take new weights."""

    def run(self, *batch: Any) -> Any:
        if batch == (9,):
            raise ConfigurationError("weights that were changed in place cannot be taken")
        return -1

    def load(self) -> None:
        raise RuntimeError("no memory")


@pytest.mark.parametrize("is_in_place", [False, True])
def test_weights_that_cannot_be_taken_act_in_torch(is_in_place: bool) -> None:
    choice = InferenceChoice("auto", lambda *_: Stale())
    assert choice.run(lambda rows: 5, 4) == -1

    if is_in_place:
        assert choice.run(lambda rows: 5, 9) == 5
    else:
        choice.load()

    assert choice.run(lambda rows: 5, 4) == 5
    reason = "changed in place" if is_in_place else "RuntimeError: no memory"
    assert reason in str(choice.torch_reason())


def test_weights_that_cannot_be_taken_are_an_error_of_compiled_which_compiles_anew() -> None:
    made = iter([Stale(), None])
    choice = InferenceChoice("compiled", lambda *_: next(made) or unknown())
    assert choice.run(unknown, 4) == -1

    with pytest.raises(ConfigurationError, match=r"is impossible: .* no memory"):
        choice.load()
    with pytest.raises(ConfigurationError, match=r"is impossible: .* BFloat16"):
        choice.run(unknown, 4)


@pytest.mark.parametrize(
    ("inference", "reason"),
    [
        ("auto", 'inference="auto" is torch on cuda'),
        ("torch", 'inference="torch" says so'),
        ("compiled", None),
    ],
)
def test_elsewhere_than_on_a_cpu_the_caller_s_module_runs(
    inference: str, reason: str | None
) -> None:
    choice = InferenceChoice(inference, unknown, device="cuda")

    assert choice.run(lambda rows: rows + 1, 4) == 5
    assert choice.torch_reason() == reason
    assert pickle.loads(pickle.dumps(choice)).torch_reason() == reason


def test_weights_that_come_while_a_module_is_compiled_are_taken() -> None:
    module = {"weights": "former"}

    class Copying(Failing):
        def __init__(self) -> None:
            self.load()
            module["weights"] = "new"
            self.thread = threading.Thread(target=lambda: choice.load())
            self.thread.start()
            self.thread.join(0.1)  # it waits for this to end

        def load(self) -> None:
            self.weights = module["weights"]

    made: list[Copying] = []

    def compile(*batch: Any) -> Copying:
        made.append(Copying())
        return made[0]

    choice = InferenceChoice("compiled", compile)
    choice.prepare(4)
    made[0].thread.join()

    assert made[0].weights == "new"
