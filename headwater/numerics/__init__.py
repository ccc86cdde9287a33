"""Every arithmetic kernel: a plain reference and a fast path, compared by tests.

Knows shapes, dtypes and devices; nothing of sequences, requests or models.
``select.py`` picks an implementation by device and mode and is the only file
that names a vendor.
"""
