"""What all endpoints share: listening, the handshake, tokens, health, draining."""
