"""A against B on one board: what they are, how they are measured in turns, and the verdict."""
