r"""Train here on a simulator that runs on another machine.

The other machine needs the base install, ``pip install .``, which has neither Ray nor torch. There,
make a token, start the endpoint on an address of that machine, and leave it running:

    (umask 077; python -c "import secrets; print(secrets.token_urlsafe())" > token)
    rlmesh-ray serve-env CartPole-v1 --num-envs 8 --address 192.0.2.7:5555 --token-file token

Here, where Ray and RLlib are (``pip install ".[rllib]"``), with a copy of that file, which nobody
else may read (``chmod 600 token``):

    python examples/simulator_on_another_machine.py 192.0.2.7:5555 --token-file token

A token alone does not hide what travels. In a network that other people use, add TLS. Make a
certificate there, start the endpoint with ``--tls-cert certificate.pem --tls-key key.pem``, and
give a copy of the certificate here, as ``--tls-ca certificate.pem``:

    openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=simulator \
        -addext subjectAltName=IP:192.0.2.7 -keyout key.pem -out certificate.pem

``rlmesh-ray inspect 192.0.2.7:5555 --token-file token`` shows whether it can be reached.
"""

import argparse
import sys
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import ClientTls, RlmeshError, TokenFile
from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("addresses", nargs="+", help="HOST:PORT of each endpoint")
parser.add_argument("--token-file", type=Path, required=True, help="holds the endpoints' token")
parser.add_argument("--tls-ca", type=Path, help="who must have signed the endpoints' certificate")
parser.add_argument("--runners", type=int, default=1, help="EnvRunners; 0: this process samples")
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns."""
    config = PPOConfig().training(
        lr=1e-3,
        gamma=0.99,
        lambda_=0.9,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=10,
    )
    config.env_runners(num_env_runners=arguments.runners)
    try:
        # The endpoints are asked here what they serve: a wrong token or address shows at once.
        configure(
            config,
            arguments.addresses,
            # Its text: runners may be on nodes that have no such file.
            token=TokenFile(arguments.token_file).client_token(),
            tls=ClientTls(root_ca=arguments.tls_ca) if arguments.tls_ca else None,
        )
    except RlmeshError as error:
        sys.exit(f"error: {error}")
    ray.init(log_to_driver=False)
    algorithm = config.build_algo()
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        print(
            f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}", flush=True
        )
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
