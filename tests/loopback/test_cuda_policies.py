"""Policies on a GPU act as on the CPU; what is not about compilation runs on the CPU, too.

``test_compiled_policies.py`` has compiled policies on the CPU.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows
from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy, TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)
pytestmark = [
    # Torch would rather have torch.export than TorchScript; its compiler uses what is deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Advice of torch's compiler for lower precision.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Torch 2.11 says so of a file that it reads.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    # Modules that cuBLAS and cuDNN have not seen are initialised when they run first.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
BUCKETS = {"buckets": [2, 8]}
COMPILED = [{"inference": "compiled"}, {"inference": "compiled", **BUCKETS}]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
POLICIES = [
    *(("cpu", options) for options in ({}, BUCKETS)),
    *(pytest.param("cuda", options, marks=needs_cuda) for options in ({}, BUCKETS, *COMPILED)),
]
"""Devices, and options of policies."""
SIZES = (1, 2, 3, 8, 11)
TOLERANCE = 1e-4

BOX = BoxSpec((3,), "float32", np.zeros(3, "f4").tobytes(), np.ones(3, "f4").tobytes())
FRAME = BoxSpec((8, 8, 4), "uint8", bytes(256), b"\xff" * 256)
CONTRACT = EnvContract("Test-v0", BOX, BOX, 16, AutoresetMode.DISABLED)
OBSERVATIONS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
OBSERVATIONS.flags.writeable = False  # as from the wire

Opener = Callable[[torch.nn.Module, str], Policy]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what other tests have compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))


class Convolutions(torch.nn.Module):
    """Takes frames, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 3)
        )

    def forward(self, frames: torch.Tensor) -> Any:
        return self.layers(frames.permute(0, 3, 1, 2).float() / 255)


class Memory(torch.nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(3, 8)
        self.head = torch.nn.Linear(8, 3)

    def initial_state(self) -> Any:
        return {"hidden": torch.zeros(8), "cell": (torch.zeros(8),)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        hidden, cell = self.cell(x, (state["hidden"], state["cell"][0]))
        return self.head(hidden), {"hidden": hidden, "cell": (cell,)}


def act(policy: Policy, num_rows: int, contract: EnvContract = CONTRACT, values: Any = None) -> Any:
    slots = [PredictSlot(lane, "", 0, reset=False) for lane in range(num_rows)]
    observations = (OBSERVATIONS if values is None else values)[:num_rows]
    return np.asarray(policy.predict(contract, Rows(observations, [RouteRows("r", slots)])))


def expected(module: torch.nn.Module, num_rows: int, values: Any = None) -> Any:
    observations = torch.tensor((OBSERVATIONS if values is None else values)[:num_rows])
    with torch.no_grad():
        return module(observations).numpy()


def twin(module: torch.nn.Module, make: Callable[[], torch.nn.Module] = mlp) -> torch.nn.Module:
    """Return another module with the same weights, to be moved to a device."""
    other = make()
    other.load_state_dict(module.state_dict())
    return other


def saved(file: Path, module: torch.nn.Module, form: str) -> str:
    if form == "TorchScript":
        torch.jit.save(torch.jit.script(module), str(file))
    else:
        rows = torch.export.Dim("rows", min=1, max=64)
        torch.export.save(
            torch.export.export(
                module, (torch.tensor(OBSERVATIONS[:2]),), dynamic_shapes=({0: rows},)
            ),
            file,
        )
    return str(file)


# --- the same actions ------------------------------------------------------------------


@pytest.mark.parametrize(("device", "options"), POLICIES)
def test_a_module_acts_as_on_the_cpu_with_every_option(
    device: str, options: dict[str, Any]
) -> None:
    module = mlp()
    policy = TorchPolicy(twin(module), device=device, **options)

    policy.check_contract(CONTRACT)

    for num_rows in SIZES:
        assert np.allclose(act(policy, num_rows), expected(module, num_rows), atol=TOLERANCE)


@pytest.mark.parametrize(("device", "options"), POLICIES)
def test_a_convolutional_module_acts_as_on_the_cpu(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default torch convolves with 10 bits of precision on a GPU.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = Convolutions()
    frames = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 4), np.uint8)
    of_frames = EnvContract("Test-v0", FRAME, BOX, 16, AutoresetMode.DISABLED)
    policy = TorchPolicy(twin(module, Convolutions), device=device, **options)

    policy.check_contract(of_frames)

    for num_rows in SIZES:
        actions = act(policy, num_rows, of_frames, frames)
        assert np.allclose(actions, expected(module, num_rows, frames), atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["TorchScript", "torch.export"])
@pytest.mark.parametrize("buckets", [(), (2, 8)])
def test_a_file_acts_as_on_the_cpu(
    device: str, form: str, buckets: tuple[int, ...], tmp_path: Path
) -> None:
    module = mlp()
    policy: Any = load_policy(
        saved(tmp_path / "policy", module, form), device=device, buckets=buckets
    )

    policy.check_contract(CONTRACT)

    assert policy.traits.kind == form
    for num_rows in SIZES:
        assert np.allclose(act(policy, num_rows), expected(module, num_rows), atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_an_exported_program_can_be_compiled(device: str, tmp_path: Path) -> None:
    module = mlp()
    file = saved(tmp_path / "policy.pt2", module, "torch.export")
    policy = load_policy(file, device=device, buckets=(2, 8), inference="compiled")

    policy.check_contract(CONTRACT)

    for num_rows in SIZES:
        assert np.allclose(act(policy, num_rows), expected(module, num_rows), atol=TOLERANCE)


@pytest.mark.parametrize(("device", "options"), POLICIES)
def test_a_recurrent_module_keeps_the_states_that_it_has_on_the_cpu(
    device: str, options: dict[str, Any]
) -> None:
    module = Memory()
    policy = RecurrentTorchPolicy(twin(module, Memory), device=device, **options)
    on_cpu = RecurrentTorchPolicy(module)

    policy.check_contract(CONTRACT)

    for num_rows in (5, 2, 11, 3, 11):
        assert np.allclose(act(policy, num_rows), act(on_cpu, num_rows), atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_choose_the_actions_that_they_choose_on_the_cpu(device: str) -> None:
    module = mlp()
    discrete = EnvContract("Test-v0", BOX, DiscreteSpec(3, start=5), 16, AutoresetMode.DISABLED)
    policy = TorchPolicy(twin(module), device=device, buckets=[4])

    actions = act(policy, 16, discrete)

    assert np.array_equal(actions, expected(module, 16).argmax(axis=1) + 5)


# --- weights ---------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "options"), POLICIES)
def test_new_weights_act_from_the_next_batch_on(device: str, options: dict[str, Any]) -> None:
    module, other = mlp(), mlp()
    policy = TorchPolicy(twin(module), device=device, **options)
    policy.check_contract(CONTRACT)

    for network in (module, other, module):
        # Arrays, and tensors that are on the CPU.
        policy.set_weights({k: v.numpy() for k, v in network.state_dict().items()})
        assert np.allclose(act(policy, 3), expected(network, 3), atol=TOLERANCE)
        policy.set_weights(network.state_dict())
        assert np.allclose(act(policy, 11), expected(network, 11), atol=TOLERANCE)

    weights = policy.get_weights()
    assert np.array_equal(weights["0.weight"], module.state_dict()["0.weight"].numpy())


# --- compilation -----------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("options", COMPILED)
def test_all_is_compiled_and_captured_when_a_contract_is_checked(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []

    class CountedGraph(torch.cuda.CUDAGraph):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            captured.append(cls)
            return super().__new__(cls, *args, **options)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CountedGraph)
    policy = TorchPolicy(mlp(), device="cuda", **options)
    counters = torch._dynamo.utils.counters

    policy.check_contract(CONTRACT)
    found = (counters["stats"]["unique_graphs"], len(captured))
    for num_rows in SIZES * 2:
        act(policy, num_rows)

    assert found == (2, 2 if "buckets" in options else 0)
    assert (counters["stats"]["unique_graphs"], len(captured)) == found
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_two_servers_of_one_process_serve_compiled_modules_each_in_its_own_thread(
    device: str,
) -> None:
    modules = [mlp(), mlp()]
    first, second = (
        TorchPolicy(twin(module), device=device, buckets=[2, 8], inference="compiled")
        for module in modules
    )
    # A use in this thread, before the servers' threads run the policy.
    first.check_contract(CONTRACT)
    act(first, 3)

    for module, policy in zip(modules, (first, second), strict=True):
        with ModelServer(policy) as server, RemoteModel(server.address) as model:
            model.configure_route(CONTRACT)
            for _ in range(3):
                actions = model.predict(OBSERVATIONS)
                assert np.allclose(actions, expected(module, 16), atol=TOLERANCE)


@needs_cuda
def test_compiled_modules_run_at_the_same_time() -> None:
    modules = [mlp(), mlp()]
    policies = [
        TorchPolicy(twin(module), device="cuda", buckets=[2, 8], inference="compiled")
        for module in modules
    ]
    results: list[Any] = []

    for policy in policies:  # one after the other: a graph is captured while nothing else runs
        policy.check_contract(CONTRACT)

    def work(module: torch.nn.Module, policy: TorchPolicy) -> None:
        wrong = [
            not np.allclose(act(policy, num_rows), expected(module, num_rows), atol=TOLERANCE)
            for _ in range(50)
            for num_rows in SIZES
        ]
        results.append(sum(wrong))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(modules, policies, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [0, 0]


# --- the device ------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_server_answers_with_the_actions_of_the_cpu_and_takes_new_weights(device: str) -> None:
    module, other = mlp(), mlp()
    policy = TorchPolicy(twin(module), device=device, buckets=[2, 8])

    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        before = model.predict(OBSERVATIONS)
        server.set_weights(other.state_dict())
        after = model.predict(OBSERVATIONS)

    assert np.allclose(before, expected(module, 16), atol=TOLERANCE)
    assert np.allclose(after, expected(other, 16), atol=TOLERANCE)


@needs_cuda
def test_a_gpu_that_is_not_there_is_refused_and_those_that_are_there_are_named() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"device=cuda:77 is not available: torch finds no such GPU; use one of .*'cuda:0'",
    ):
        TorchPolicy(mlp(), device="cuda:77")


@needs_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_may_be_named_with_its_number_or_without(name: str) -> None:
    policy = TorchPolicy(mlp(), device=name)

    assert policy._module.device == torch.device("cuda:0")
    assert not policy.traits.only_computes


@needs_cuda
@pytest.mark.parametrize("options", [BUCKETS, *COMPILED])
def test_the_memory_of_the_gpu_does_not_grow_with_batches(options: dict[str, Any]) -> None:
    policy = RecurrentTorchPolicy(Memory(), device="cuda", **options)
    policy.check_contract(CONTRACT)
    for num_rows in SIZES:
        act(policy, num_rows)
    before = torch.cuda.memory_allocated()

    for _ in range(100):
        for num_rows in SIZES:
            act(policy, num_rows)

    assert torch.cuda.memory_allocated() == before
