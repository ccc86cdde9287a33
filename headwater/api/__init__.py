"""The door: HTTP routes, streams, errors, keys and the metrics page.

Turns a caller's JSON into core Requests (through ``recipe``), hands them to the
Generator port and turns what comes back into the caller's dialect. Knows no
scheduler, no block and no tensor. Files directly in this folder are the same
for every dialect; ``openai/`` and ``anthropic/`` hold what is theirs.
"""
