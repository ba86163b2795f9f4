"""openpi: policies over WebSocket."""
