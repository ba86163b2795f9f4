"""Options that commands share, and how they are read."""
