"""The words every room shares: ids, requests, sequences, blocks, step plans, ports, errors.

Knows only the standard library. Holds no policy, no tensors, no I/O: a value
from here can cross a process boundary or enter the simulator unchanged.
"""
