"""``python -m benchmarks``: the command line."""

import sys

from benchmarks.cli.commands import app
from rlmesh_ray.cli.main import run

sys.exit(run(app, "python -m benchmarks", sys.argv[1:]))
