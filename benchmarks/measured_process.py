"""What the processes that a bench starts and listens to have in common."""

import os
import sys
from typing import TextIO


def only_for_the_parent() -> TextIO:
    """Return what was standard output; what anything prints goes to standard error from now on."""
    parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return parent
