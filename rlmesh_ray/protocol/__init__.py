"""The sans-I/O heart: messages, handshake, sessions, episode accounting."""
