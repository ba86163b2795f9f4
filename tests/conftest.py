"""For all tests."""

import os
import signal

from hypothesis import HealthCheck, settings

import rlmesh_ray.grpc_setup  # noqa: F401  # before any test loads gRPC, which only users do otherwise

# Machines are busy: how long an example takes, or to draw one, says nothing. Which are drawn
# depends on the test alone, so that what fails once fails again.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nor does how long Ray's control store takes to start: Ray gives it 30 s, and on a machine with
# other work that was too little once. Commands and examples that tests start inherit it.
GCS_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
os.environ.setdefault(GCS_WAIT_VARIABLE, "50")
