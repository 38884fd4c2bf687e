"""Faults that are planted by seed, and whether the harness names them: `make bench-bisect`."""
