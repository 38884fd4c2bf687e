"""The benchmarks, found by file name: a module with `SUMMARY` and `run(bench) -> rows`.

`decode_135m.py` is asked for as `decode-135m`.
"""
