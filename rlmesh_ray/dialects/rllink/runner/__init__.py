"""RLlib EnvRunner that samples from RLlink simulators."""

import rlmesh_ray.rllib  # noqa: F401 # it imports this package: in this order, there is no cycle
