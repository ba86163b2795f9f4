"""Messages between a measured process and its parent: JSON lines over the child's pipes.

A server writes where it listens, and lives until its standard input ends, so that it never outlives
a bench that was killed. Standard library only: scripts of other virtual environments use it, too.
"""

import json
import sys


def say(**fields: object) -> None:
    """Write one line to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def stay(address: str) -> None:
    """Send the parent the server's address, and block until the parent ends."""
    say(address=address)
    sys.stdin.read()
