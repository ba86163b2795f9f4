"""RLlink: its frames and messages, in the JSON of its description and in Ray's msgpack."""
