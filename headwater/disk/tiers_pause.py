"""How the tiers' threads let a step's thread run between two short pieces of work.

A thread that only releases the interpreter's lock gets it back before a thread that
waits for it has woken up; that one then waits for the switch interval, 5 ms, which is a
whole decode step. Sleeping, however short, hands the lock over.
"""

from __future__ import annotations

import time

PAUSE_S = 0.0001


def let_others_run() -> None:
    """After at most about a millisecond of work that holds the interpreter's lock."""
    time.sleep(PAUSE_S)
