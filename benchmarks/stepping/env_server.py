"""EnvServer as serve-env has it: ``python -m benchmarks.stepping.env_server HOSTING``."""

import sys
import tempfile
from pathlib import Path

from benchmarks.control import stay
from benchmarks.stepping.environments import environment
from benchmarks.stepping.specs import ServerSpec
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.env.env_server import EnvServer

if __name__ == "__main__":
    server_spec = ServerSpec.from_line(sys.argv[1])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        address = f"unix:{Path(folder, 'endpoint')}" if server_spec.is_socket else "127.0.0.1:0"
        with EnvServer(
            environment(server_spec.env, server_spec.num_envs),
            num_envs=server_spec.num_envs,
            env_kwargs=server_spec.env_kwargs,
            address=address,
            sessions_per_worker=server_spec.sessions_per_worker,
            record=Path(folder, "recording") if server_spec.records else None,
        ) as server:
            freeze_heap()
            stay(server.address)
