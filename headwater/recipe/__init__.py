"""How one model is spoken to: text and messages in, exact token ids out, and back again.

Knows tokenizers, chat templates, stop strings and the shape of one choice's
output. Knows nothing of HTTP, dialect JSON, tensors or queues. ``api`` calls it
for each request; ``app`` builds it from a model's ``TokenizerSource``.
"""
