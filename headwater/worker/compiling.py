"""Output constraints are compiled in threads of their own, beside the steps.

The scheduler starts a compilation when a request comes and lets the request wait
for it; the others go on. Knows a ``ConstraintCompiler`` and an executor, both
handed in; no sequences.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

from headwater.core.constraint import Constraint
from headwater.core.ports import ConstraintCompiler, MatcherFactory


class CompileQueue:
    """Compilations in the order in which they were asked for, as many at once as the
    executor has threads."""

    def __init__(self, compiler: ConstraintCompiler, executor: Executor) -> None:
        self._compiler = compiler
        self._executor = executor

    def start(self, constraint: Constraint) -> Future[MatcherFactory]:
        """The result is a MatcherFactory, or InvalidRequest is raised by ``result()``."""
        return self._executor.submit(self._compiler.compile, constraint)

    @property
    def num_cached_grammars(self) -> int:
        return self._compiler.num_cached_grammars
