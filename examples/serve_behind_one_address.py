"""Serve a policy from several replicas behind one address, which stays when they restart.

    python examples/serve_behind_one_address.py CHECKPOINT --address 0.0.0.0:5555 --token-file FILE

On the head of a cluster the replicas go where there is room; programs elsewhere know nothing but
the address and a token: ``RemoteModel("HEAD:5555", token=TokenFile("FILE"))``. When a replica dies
under a program, that dials again. Needs the extra ``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
import signal
import sys
import threading
from pathlib import Path

import ray

from rlmesh_ray import RlmeshError, TokenFile
from rlmesh_ray.actors import Gateway, ModelFleet

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("policy", help="a path on every node, or module:factory")
parser.add_argument("--address", default="127.0.0.1:5555", help="HOST:PORT of the gateway")
parser.add_argument("--token-file", type=Path, required=True, help="the programs' token; mode 0600")
parser.add_argument("--replicas", type=int, default=2, help="processes that serve; one CPU each")


def main(arguments: argparse.Namespace) -> None:
    """Serve until the process is stopped."""
    ray.init(log_to_driver=False)
    is_over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):  # after Ray has put its own there
        signal.signal(each, lambda *_: is_over.set())
    token = TokenFile(arguments.token_file.resolve())
    try:
        with (
            ModelFleet(arguments.policy, name="served", num_replicas=arguments.replicas) as fleet,
            Gateway(fleet, arguments.address, token=token) as gateway,
        ):
            print(f"serving on {gateway.address}: {len(fleet.addresses)} replicas", flush=True)
            is_over.wait()
    except RlmeshError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(parser.parse_args())
