"""How a measured process and the one that measures talk: JSON lines over the child's pipes.

A server says where it listens, and lives until its standard input ends, so that it never outlives
a bench that was killed.
"""

import json
import sys


def say(**fields: object) -> None:
    """Write one line to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def stay(port: int) -> None:
    """Tell the parent, and block until it goes.

    Args:
        port: Where the server listens, on 127.0.0.1.
    """
    say(port=port)
    sys.stdin.read()
