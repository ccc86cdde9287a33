"""Bookkeeping of the device's KV blocks: who holds which, what can be reused, what goes first.

Knows block ids, tokens and prefix keys; holds no tensors, no files, no clock.
``worker`` asks ``manager.KVManager``; everything else here is a part of it.
"""
