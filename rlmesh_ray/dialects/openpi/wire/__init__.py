"""Messages of openpi <-> bytes; no I/O."""
