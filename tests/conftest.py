"""For all tests."""

import logging
import os
import signal
import sys
from collections.abc import Iterator

import cloudpickle
import pytest
from hypothesis import HealthCheck, Phase, settings

import rlmesh_ray.grpc_setup  # noqa: F401  # before any test loads gRPC, which only users do otherwise

# Tests start a thousand processes. Each would compile the package anew without bytecode, and
# its NumPy would start a thread for each core, although no test multiplies large matrices.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Machines are busy: how long an example takes, or to draw one, says nothing. Which are drawn
# depends on the test alone, so that what fails once fails again; the night draws others.
settings.register_profile(
    "tests",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")
settings.register_profile(
    "nightly", parent=settings.get_profile("tests"), max_examples=1000, derandomize=False
)
# A mutant needs one example that fails, and not the smallest one.
settings.register_profile(
    "mutants", parent=settings.get_profile("tests"), phases=(Phase.explicit, Phase.generate)
)

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nor does how long Ray's control store takes to start: Ray gives it 30 s, and on a machine with
# other work that was too little once. Commands and examples that tests start inherit it.
GCS_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
os.environ.setdefault(GCS_WAIT_VARIABLE, "50")

# Warnings of Ray and its dependencies that cannot be mended here; everything else stays an error.
RAY_WARNINGS = [
    "ignore::DeprecationWarning:ray.*",
    "ignore::FutureWarning:ray.*",
    "ignore::ResourceWarning",  # sockets and files of Ray's own subprocesses
    "ignore::pytest.PytestUnraisableExceptionWarning",  # the same, seen by the collector
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs at night as slow, too, so that ``-m 'not slow'`` leaves both out.

    The environments that a module of tests defines travel to their workers by value: a worker that
    imported the module would import pytest and gRPC, often RLlib and torch.
    """
    # By its name the file that runs the documents' blocks for minutes would come last, alone. The
    # tests' Ray stays up in its process; tests that start one of their own there come first.
    on_ray = {item.path for item in items if "local_ray" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path.name != "test_shown_blocks.py", item.path in on_ray))
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
        if "tests/ray/" in str(item.path) or "ray_of_programs" in getattr(item, "fixturenames", ()):
            for warning in RAY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(autouse=True)
def package_log() -> Iterator[None]:
    """Undo what a command that a test runs in this process does to the package's log.

    A later test that expects warnings alone would find the begin and end of sessions, too.
    """
    log = logging.getLogger("rlmesh_ray")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray for all tests of this process: to start one takes eight seconds."""
    import ray  # most tests need none

    try:
        # Seconds, where it takes some; now and then it never tells its port, and leaves no log.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(GCS_WAIT_VARIABLE, "15")
            _start_ray()
    except Exception:  # noqa: BLE001  # Ray raises a plain one if its raylet does not come up
        # That is Ray's own start, no promise of ours; a second failure is this machine's, and fails
        # the tests.
        ray.shutdown()
        _start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_of_programs(local_ray: None) -> dict[str, str]:
    """The environment's variables by which programs join the tests' Ray, instead of their own."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


def _start_ray() -> None:
    import ray

    ray.init(
        "local",  # a Ray that runs on this machine is not the test's
        num_cpus=16,  # logical: tests place more actors than this machine has cores
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 1024 * 1024,
    )
