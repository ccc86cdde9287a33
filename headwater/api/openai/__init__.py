"""OpenAI's dialect: Chat Completions, Completions and Models, as that API's clients expect.

Only bodies, wire forms and error words live here; reading, checking keys,
running and streaming are the door's, the same for every dialect.
"""
