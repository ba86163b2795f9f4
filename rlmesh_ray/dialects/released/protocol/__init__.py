"""Messages, handshake and translation of rlmesh-wire-v1, without I/O."""
