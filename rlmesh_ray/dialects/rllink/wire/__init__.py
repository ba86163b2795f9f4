"""RLlink's frames and messages, as JSON and as Ray's msgpack."""
