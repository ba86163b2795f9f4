"""How a measured process and the one that measures talk: JSON lines over the child's pipes.

A server says where it listens, and lives until its standard input ends, so that it never outlives
a bench that was killed. Standard library only: scripts of other virtual environments use it, too.
"""

import json
import sys


def say(**fields: object) -> None:
    """Write one line to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def stay(address: str) -> None:
    """Tell the parent where the server listens, and block until the parent goes."""
    say(address=address)
    sys.stdin.read()
