"""Publishing the weights of a training to a served policy."""
