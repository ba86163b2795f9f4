"""Forward passes and action sampling without per-call overhead; the runner uses them, too."""
