"""Ray's own example of a client, as it is in the wheel: CartPole, for ever. Takes the port."""

import sys

from ray.rllib.examples.envs.classes.utils.dummy_external_client import _dummy_external_client

_dummy_external_client(int(sys.argv[1]))
