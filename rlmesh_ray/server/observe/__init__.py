"""What an endpoint counts and says of itself: counters, statistics, metrics, status."""
