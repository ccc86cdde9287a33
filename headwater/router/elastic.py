"""Keeps count of what each phase asked for lately, and lets idle BOTH workers change theirs.

``elastic_policy`` decides; this remembers between its plans and carries them out on the
dispatcher's books. No clock of its own: the service looks once in a while.
"""

from __future__ import annotations

import logging

from headwater.core.fleet import Holding, Role
from headwater.router.dispatch import Dispatcher
from headwater.router.elastic_policy import (
    Demand,
    ElasticLimits,
    ElasticWorker,
    Imbalance,
    plan_elastic,
)

log = logging.getLogger("headwater.router")

HALF_LIFE_S = 30.0


class Elastic:
    """One fleet's division of its BOTH workers."""

    def __init__(self, limits: ElasticLimits) -> None:
        self._limits = limits
        self._imbalance: Imbalance | None = None
        self._prefill_s = 0.0  # fading
        self._decode_s = 0.0
        self._faded_s: float | None = None

    def worked(self, prefill_s: float, decode_s: float) -> None:
        """A step took so long for each phase."""
        self._prefill_s += prefill_s
        self._decode_s += decode_s

    def look(self, dispatcher: Dispatcher, now_s: float) -> None:
        """Change at most one worker."""
        if self._faded_s is not None:
            factor = 0.5 ** ((now_s - self._faded_s) / HALF_LIFE_S)
            self._prefill_s *= factor
            self._decode_s *= factor
        self._faded_s = now_s
        books = dispatcher.books.values()
        # A worker that takes no KV could compute prompts for others, but not decode for them.
        mobile = [
            book
            for book in books
            if book.role is Role.BOTH and book.takes_kv and book.holds is Holding.ALL
        ]
        plan = plan_elastic(
            [
                ElasticWorker(
                    worker_id=book.worker_id,
                    acting=book.acting,
                    acting_for_s=now_s - book.acting_since_s,
                    is_idle=not book.parts,
                )
                for book in mobile
            ],
            num_fixed_prefill=sum(book.role is Role.PREFILL for book in books),
            num_fixed_decode=sum(book.role is Role.DECODE for book in books),
            demand=Demand(
                prefill_s=self._prefill_s + dispatcher.shared_queue_s, decode_s=self._decode_s
            ),
            imbalance=self._imbalance,
            now_s=now_s,
            limits=self._limits,
        )
        self._imbalance = plan.imbalance
        if plan.worker_id is not None:
            log.info("worker %s acts as %s from now on", plan.worker_id, plan.acting)
            dispatcher.act_as(plan.worker_id, plan.acting, now_s)
