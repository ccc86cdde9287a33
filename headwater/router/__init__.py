"""The front's traffic control: which request may enter, where it runs, what happens when a
worker dies. Knows token counts and loads; no text, no tensors, no sockets.

``api`` calls it through the Generator port; ``app`` hands it a WorkerLauncher.
"""
