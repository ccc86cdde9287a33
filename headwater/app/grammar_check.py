"""Tries a request's output constraint in a process that may die of it.

    front: GrammarChecker.check --one line of JSON--> python -m headwater.app.grammar_check
                                <--what is wrong-----

Compilers of grammars have inputs that take hours or all memory, whatever is known
of them; a thread cannot be stopped, a process can. It starts with the first
constraint, compiles for a byte vocabulary of the model's size, which gives the
same verdict, and ends when the front's end of the pipe closes.
"""

from __future__ import annotations

import hashlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.constraints import CacheLimits, GrammarCompiler
from headwater.recipe.tokenizer_byte import MIN_VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """``cpu_s`` counts processor time, so a busy machine refuses no good grammar."""

    cpu_s: int = 2
    wait_s: float = 30.0  # by the clock, starting the process included
    memory_bytes: int = 256 * 2**20  # beyond what the process has at its start
    max_remembered: int = 1024  # constraints that passed


class GrammarChecker:
    """Checks one at a time. Blocking: called in the front's parse threads."""

    def __init__(self, vocab_size: int, limits: CheckLimits | None = None) -> None:
        self._vocab_size = max(vocab_size, MIN_VOCAB_SIZE)
        self._limits = limits or CheckLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # digests of constraints

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest if ``constraint`` does not compile within the limits."""
        question = json.dumps([constraint.kind, constraint.source]).encode() + b"\n"
        key = hashlib.blake2b(question, digest_size=16).digest()
        with self._lock:
            if key in self._passed:
                self._passed.move_to_end(key)
                return
            error = self._ask(question)
            if error is not None:
                raise error
            self._passed[key] = None
            if len(self._passed) > self._limits.max_remembered:
                self._passed.popitem(last=False)

    @property
    def num_remembered(self) -> int:
        return len(self._passed)

    def close(self) -> None:
        """End the process; safe to call twice."""
        with self._lock:
            self._end()

    def _ask(self, question: bytes) -> InvalidRequest | None:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            answer = _read_line(process.stdout, self._limits.wait_s)
        except BrokenPipeError:
            answer = b""
        if not answer:  # it died of it, or is still at it
            self._end()
            return InvalidRequest(
                "the schema or grammar takes too long or too much memory to compile; "
                "make it simpler",
                code="constraint_too_complex",
            )
        found = json.loads(answer)
        return None if found is None else InvalidRequest(found["message"], code=found["code"])

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        arguments = (self._vocab_size, limits.cpu_s, limits.memory_bytes)
        return subprocess.Popen(
            [sys.executable, "-m", "headwater.app.grammar_check", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where a compiler that dies writes its last words
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # closes the pipes and collects it


def _read_line(stream: IO[bytes], wait_s: float) -> bytes:
    """The line, or b"" if the other end closed or none came in time. Answers are short
    and written at once."""
    ready, _, _ = select.select([stream], [], [], wait_s)
    return stream.readline() if ready else b""


# ---- the process --------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Answer questions on standard input until it closes."""
    vocab_size, cpu_s, memory_bytes = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front to act on
    compiler = GrammarCompiler.from_source(
        TokenizerSource(kind="byte", vocab_size=vocab_size), limits=CacheLimits(max_grammars=0)
    )
    compiler.compile(Constraint("regex", "a"))  # now, so that it counts as the process's own
    _limit_memory(memory_bytes)
    for line in sys.stdin.buffer:
        kind, source = json.loads(line)
        _limit_cpu(cpu_s)
        try:
            compiler.compile(Constraint(kind, source))
            answer = None
        except InvalidRequest as error:
            answer = {"message": str(error), "code": error.code}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory(memory_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere only the processor time is limited
        own_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_bytes, resource.RLIM_INFINITY))


def _limit_cpu(cpu_s: int) -> None:
    """For what comes now: the system counts from the start of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1:])
