"""What the live page costs a training, and how soon it is there."""
