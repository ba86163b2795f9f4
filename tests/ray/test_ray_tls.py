"""One setting secures a fleet: where Ray uses TLS, so do its endpoints and their clients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.loopback.certificates import Authority, needs_openssl

pytestmark = [needs_openssl, pytest.mark.slow]

SCRIPT = """
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import RemoteEnv, evaluate
from rlmesh_ray.errors import EndpointError
from rlmesh_ray.actors import EnvFleet, ModelFleet
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.rllib import configure

ray.init(num_cpus=4, include_dashboard=False)
with EnvFleet("CartPole-v1", num_endpoints=1, num_cpus=0.5) as fleet:
    token, address = fleet.tokens[0], fleet.addresses[0]
    for tls in (None, ClientTls(ClientTls.from_ray().root_ca)):
        try:
            RemoteEnv(address, token=token, tls=tls)
        except EndpointError as error:
            print("refused", "TLS" in str(error))
    env = RemoteEnv(address, token=token, tls=RayTls())
    env.reset()
    env.close()
    print("a client is let in")

    config = configure(
        PPOConfig()
        .env_runners(num_env_runners=1, rollout_fragment_length=64)
        .training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1),
        fleet,
    )
    algorithm = config.build_algo()
    result = algorithm.train()
    print("sampled", result["env_runners"]["num_env_steps_sampled"])
    algorithm.stop()
    def zeros(observations):
        return np.zeros(len(observations), np.int64)

    with ModelFleet(zeros, name="zeros") as models:
        print("evaluated", len(evaluate(fleet, models, episodes=2, seed=0).episodes))
"""


@pytest.mark.timeout(240)
def test_where_ray_uses_tls_its_endpoints_do_and_runners_know(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    certificate, key = ours.sign("node", host=ray.util.get_node_ip_address())
    environ = {
        **os.environ,
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(ours.certificate),
        "RAY_ADDRESS": "local",
    }

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=220
    )

    assert done.returncode == 0, done.stderr[-4000:]
    reported = [line for line in done.stdout.splitlines() if not line.startswith("(")]
    assert [line for line in reported if line.startswith("refused")] == ["refused True"] * 2
    assert "a client is let in" in reported
    assert "sampled 64" in reported
    assert "evaluated 2" in reported
