"""A module each, with a `BENCH`."""
