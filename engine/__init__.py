"""The decode engine that runs on a board: it needs Python 3.9, numpy and psutil, no more."""
