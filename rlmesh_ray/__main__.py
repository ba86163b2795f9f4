"""``python -m rlmesh_ray``: the command line without the script ``rlmesh-ray``."""

import sys

from rlmesh_ray.cli.main import main

sys.exit(main())
