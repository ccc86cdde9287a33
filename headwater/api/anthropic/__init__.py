"""Anthropic's dialect: Messages and its token count, as that API's clients expect.

Only bodies, blocks, events and error words live here; reading, checking keys,
running and streaming are the door's, the same for every dialect.
"""
