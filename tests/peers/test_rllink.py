"""Real peers of RLlink: what is in Ray's wheel, and a client written from the description alone.

Ray needs msgpack-numpy to speak it; that lies in a folder of its own, which ``make`` fills and
which only the peers' processes have on their path.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import RAY, RLlinkClient
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib import RLMeshRLlinkEnvRunner, configure_rllink
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

ROOT = Path(__file__).parents[2]
EXTRA = ROOT / ".venvs" / "rllink"
PEERS = ROOT / "tests" / "peers" / "rllink"

# Each starts processes that import Ray.
pytestmark = pytest.mark.slow

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    assert (EXTRA / "msgpack_numpy.py").exists(), (
        "run `make .venvs/rllink/.ready` first (`make test` does)"
    )
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(PEERS / name), *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": str(EXTRA), "PYTHONWARNINGS": "ignore"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ppo(*, num_steps: int, **options: Any) -> PPOConfig:
    env = gymnasium.make("CartPole-v1")
    config = PPOConfig().debugging(seed=1)
    config.env_runners(num_env_runners=0, rollout_fragment_length=num_steps)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    return configure_rllink(
        config,
        observation_space=env.observation_space,
        action_space=env.action_space,
        address="127.0.0.1:0",
        **options,
    )


@pytest.fixture
def listen() -> Iterator[Callable[[PPOConfig], RLMeshRLlinkEnvRunner]]:
    runners: list[RLMeshRLlinkEnvRunner] = []

    def make(config: PPOConfig) -> RLMeshRLlinkEnvRunner:
        runners.append(RLMeshRLlinkEnvRunner(config=config, worker_index=0))
        return runners[-1]

    yield make
    for runner in runners:
        runner.stop()


def port_of(runner: RLMeshRLlinkEnvRunner) -> str:
    return runner.address.rpartition(":")[2]


# --- Ray's client ------------------------------------------------------------------------


def test_rays_client_samples_for_our_runner(
    start: Start, listen: Callable[[PPOConfig], RLMeshRLlinkEnvRunner]
) -> None:
    # It does not seed its CartPole, but no pole falls within five steps.
    runner = listen(ppo(num_steps=5, sends_pickled_config=True))
    start("dummy_client.py", port_of(runner))

    first = runner.sample()
    weights = {name: values + 0.5 for name, values in runner.module.get_state().items()}
    runner.set_state({"rl_module": weights, "weights_seq_no": 4})
    second = runner.sample()

    assert sum(map(len, first)) == sum(map(len, second)) == 5
    # It acts with what it was given: what it says of its actions is what our module says.
    for episode in second:
        obs = torch.as_tensor(episode.get_observations(slice(0, len(episode))))
        inputs = runner.module.forward_exploration({"obs": obs})["action_dist_inputs"]
        found = episode.get_extra_model_outputs("action_dist_inputs")
        assert np.abs(found - inputs.detach().numpy()).max() < 1e-5
    # The episode that was running goes on, as one episode.
    assert second[0].id_ == first[-1].id_
    assert second[0].t_started == len(first[-1])


def test_without_a_pickled_config_rays_client_gives_up(
    start: Start, listen: Callable[[PPOConfig], RLMeshRLlinkEnvRunner]
) -> None:
    runner = listen(ppo(num_steps=50))

    _, errors = start("dummy_client.py", port_of(runner)).communicate(timeout=60)

    assert "KeyError: 'config'" in errors


# --- Ray's server ------------------------------------------------------------------------


def connected(port: int, process: subprocess.Popen[str]) -> RLlinkClient:
    while process.poll() is None:
        with contextlib.suppress(RlmeshError):
            return RLlinkClient(f"localhost:{port}", encoding=RAY, timeout_s=60)
    raise AssertionError(process.communicate()[1])


def test_our_client_samples_for_rays_runner(start: Start) -> None:
    port = int(free_address().rpartition(":")[2])
    process = start("ray_server.py", port, 2)
    outputs = {"action_logp": np.full(2, -0.5, "f4"), "action_dist_inputs": np.zeros((2, 2), "f4")}
    obs = np.arange(20, dtype=np.float32).reshape(5, 4)

    with connected(port, process) as client:
        config = client.get_config()
        state = client.get_state()
        chunk = m.Chunk(obs[:3], np.array([0, 1]), np.ones(2), False, False, "mine", outputs)
        after_one = client.exchange([chunk])
        ended = m.Chunk(obs[2:], np.array([1, 1]), np.ones(2), True, False, "mine", outputs)
        after_two = client.exchange([ended])

    assert config.pickled_config  # bytes, which are not read here
    assert (state.weights_seq_no, after_one.weights_seq_no) == (0, 1)
    for name, values in state.weights.items():
        assert np.allclose(after_one.weights[name], values + 1)
        assert np.allclose(after_two.weights[name], values + 2)
    assert process.stdout is not None
    reported = (line for line in process.stdout if line.startswith("["))  # Ray's server prints, too
    (first,), (second,) = json.loads(next(reported)), json.loads(next(reported))
    assert (first["id"], first["length"], first["is_done"]) == ("mine", 2, False)
    assert (second["return"], second["is_done"]) == (2.0, True)
    assert second["last_obs"] == [16, 17, 18, 19]
    assert first["logp"] == [-0.5, -0.5]


# --- a client of the description ---------------------------------------------------------


def test_a_client_of_the_description_samples_with_two_more_beside_it(
    start: Start, listen: Callable[[PPOConfig], RLMeshRLlinkEnvRunner]
) -> None:
    runner = listen(
        ppo(num_steps=50, num_simulators=3, sends_pickled_config=True, model_input="onnx::Gemm_0")
    )
    start("spec_client.py", port_of(runner), "onnx::Gemm_0", 1)
    start("spec_client.py", port_of(runner), "onnx::Gemm_0", 2)
    start("dummy_client.py", port_of(runner))

    assert eventually(lambda: runner.get_metrics()["num_simulators_per_env_runner"].peek() == 3)
    samples = []
    for number in range(1, 4):
        samples.append(runner.sample())
        assert runner.get_metrics()["num_simulators_per_env_runner"].peek() == 3
        weights = {name: values * 1.1 for name, values in runner.module.get_state().items()}
        runner.set_state({"rl_module": weights, "weights_seq_no": number})

    assert [sum(map(len, sample)) for sample in samples] == [150] * 3
    for episode in samples[-1]:
        episode.validate()
        assert episode.get_extra_model_outputs("action_logp").shape == (len(episode),)


# --- msgpack-numpy -----------------------------------------------------------------------

PATCHED = """
import os, sys
import msgpack, msgpack_numpy, numpy as np
msgpack_numpy.patch()

class Mine:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

array = np.array([Mine()], object)
body = msgpack.packb({"type": "EPISODES", "episodes": [{"observations": {"data": array}}]})
from rlmesh_ray.errors import CodecError
from rlmesh_ray.dialects.rllink.wire import RAY
try:
    RAY.parse_request(body)
except CodecError as error:
    print("refused:", error)
assert not os.path.exists(sys.argv[1])
msgpack.unpackb(body)
assert os.path.exists(sys.argv[1])  # this is what it is protected from
"""


def test_a_pickle_is_not_run_even_where_msgpack_numpy_is_at_work(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "patched.py"
    script.write_text(PATCHED)

    output, errors = start(str(script), tmp_path / "made").communicate(timeout=60)

    assert "refused: an array of kind" in output, errors
    assert not errors


# --- learning ----------------------------------------------------------------------------


def learn(config: PPOConfig, connect: Callable[[str], object], goal: float) -> float:
    """Train until the mean return is above ``goal``; return the best mean."""
    config.training(
        train_batch_size_per_learner=2000, minibatch_size=250, num_epochs=8, lr=1e-3, gamma=0.99,
        entropy_coeff=0.0,
    )  # fmt: skip
    # Other tests of this process may have started one; one on this machine is not the test's.
    is_own = not ray.is_initialized()
    if is_own:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    algorithm = config.build_algo()
    best = 0.0
    try:
        connect(algorithm.env_runner.address.rpartition(":")[2])
        for _ in range(60):
            result = algorithm.train()["env_runners"]
            best = max(best, result.get("episode_return_mean", 0.0))
            if best >= goal:
                break
    finally:
        algorithm.stop()
        if is_own:
            ray.shutdown()
    return best


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_rays_client_learns_cartpole_to_the_threshold_of_rays_own_example(start: Start) -> None:
    config = ppo(num_steps=2000, sends_pickled_config=True)
    config.rl_module(model_config={"fcnet_hiddens": [32], "fcnet_activation": "linear",
                                   "vf_share_layers": True})  # fmt: skip

    assert learn(config, lambda port: start("dummy_client.py", port), 450.0) >= 450.0


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_three_clients_of_the_description_learn_cartpole(start: Start) -> None:
    config = ppo(num_steps=667, num_simulators=3)

    def connect(port: str) -> None:
        for seed in range(3):
            start("spec_client.py", port, "obs", seed)

    assert learn(config, connect, 300.0) >= 300.0
