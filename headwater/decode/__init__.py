"""The decode phase: who gets its next token, who must give way, and when a sequence ends.

Knows tokens, blocks and order as numbers; runs nothing. ``worker`` asks.
"""
