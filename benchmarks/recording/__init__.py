"""What a recording costs what steps, and its writer."""
