"""Benchmarks: every number a ratio in one interleaved run. `make bench`; see docs/benchmarks.md."""
