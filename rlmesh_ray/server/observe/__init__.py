"""What an endpoint says of itself: statistics, metrics, status, logs, observers."""
