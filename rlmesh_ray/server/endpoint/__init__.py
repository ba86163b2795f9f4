"""What all endpoints share: listening, the gate, handshakes, calls, health, the log."""
