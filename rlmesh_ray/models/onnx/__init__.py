"""Forward passes in ONNX Runtime: export of torch modules, sessions, drawing of actions."""
