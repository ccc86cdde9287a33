"""The prefill phase: which prompts are computed next, and how much of each.

Knows tokens, blocks and order as numbers; runs nothing. ``worker`` asks.
"""
