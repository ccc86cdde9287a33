"""One process's work: ask the phases for the next step, run it, apply it, tell the front.

Knows plans, results and messages; no tensors, no text, no sockets (a port is handed in).
"""
