"""Weights to logits: finds a model, checks it, loads it, and runs its forward pass.

Knows files, configs, tensor names and a family's arithmetic, written in
``numerics.Ops``. Knows nothing of requests, sequences, schedules or text.
``engine`` calls the loaded model; ``app`` calls the catalogue and the loader.
"""
