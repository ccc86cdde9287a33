"""Leave out what a coding agent changes in its system text with every request (B05). Opt-in.

Some agents put a line for their own billing before the system text, with a value
that is new each time, so no two prompts of one session share a prefix. Exactly
this shape is left out, and nothing else:

* the *first* of at least two blocks of one system message,
* that is one line, ``x-`` + words + ``-billing`` or ``-billing-header``, a colon, a
  space and at most 512 further characters:

      x-agent-billing: v=1; h=5ab81c                      left out
      x-acme-billing-header: version=2; session=9f3e;     left out
      x-agent-billing: v=1\\nYou are a helpful agent.      kept: more than the line
      Note: x-agent-billing: v=1                          kept: begins otherwise

Every other block is passed on byte for byte. Off unless the setting
``recipe.normalise_agent_noise`` is on: what a caller sent is not ours to change.
Called by ``api`` before the blocks of a system message are joined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NOISE = re.compile(r"x-[a-z0-9]+(?:-[a-z0-9]+){0,4}?-billing(?:-header)?: [^\r\n]{0,512}\n?")


def without_agent_noise(blocks: Sequence[str]) -> Sequence[str]:
    """``blocks`` of one system message, less a first block that is an agent's billing line.

    >>> without_agent_noise(["x-agent-billing: v=1; h=5ab81c", "You are an agent."])
    ['You are an agent.']
    >>> without_agent_noise(["You are an agent.", "x-agent-billing: v=1"])
    ['You are an agent.', 'x-agent-billing: v=1']
    """
    if len(blocks) > 1 and _NOISE.fullmatch(blocks[0]):
        return list(blocks[1:])
    return blocks
