"""The released rlmesh, generation rlmesh-wire-v1: messages to bytes and back."""
