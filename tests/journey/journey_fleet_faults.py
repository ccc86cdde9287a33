"""Does harm to a running fleet in seeded rounds, under load, and counts what became of it.

    round    questions are asked -> a phase is reached -> a worker is killed, stopped or cut
             -> every answer is compared with the undisturbed one -> every block is free again

A split whose second workers joined by address, so that there are connections to cut. Knows
processes and the door; nothing of what is inside. Linux: it reads /proc and cuts sockets of
other processes by way of their descriptors, which needs no privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from journey_fleet import Answer, Question, Questions, Verdict, ask, ask_all, describe, judge
from journey_server import Served, children_of, free_port, is_alive, is_ready, serving

# Large enough that a phase lasts: some 0.2 ms a prompt token and 5 ms a step.
MODEL = "--model=toy:layers=6,hidden=256,mlp=512"
NUM_BLOCKS = 192
COMMON = (
    MODEL, "--numerics=reference", "--block-tokens=16", f"--num-blocks={NUM_BLOCKS}", "--threads=1",
    "--max-step-tokens=96", "--max-mixed-prefill-tokens=64",
    "--restart-backoff-s=0.05", "--restart-backoff-max-s=0.2",
)  # fmt: skip
FRONT = ("--stuck-after-s=1.5", "--lost-after-s=2", "--joined-silent-s=3", "--no-access-log")
# Past this a worker that has vanished is known to all: the longest of a handoff's limits that a
# fault can wait for (10 s for an offer), and what a busy machine adds.
LEASE_S = 15.0
ROUND_LIMIT_S = 90.0
PHASE_LIMIT_S = 5.0
SYS_PIDFD_GETFD = 438


class Phase(StrEnum):
    """When the harm is done, as it can be seen from outside."""

    BEFORE_HELLO = "before hello"
    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOVER = "hand-over"
    FIRST_TOKEN = "first token"
    DECODE = "decode"


class Harm(StrEnum):
    KILL = "kill"
    STOP_SHORT = "stop, shortly"  # and goes on before anybody has given it up
    STOP_LONG = "stop, long"
    CUT = "cut"  # its TCP connections


class Victim(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    JOINED_PREFILL = "joined prefill"
    JOINED_DECODE = "joined decode"


@dataclass(frozen=True, slots=True)
class Fault:
    victim: Victim
    phase: Phase
    harm: Harm

    def __str__(self) -> str:
        return f"{self.harm} {self.victim} at {self.phase}"


# What a short run does: every victim, phase and harm, those that found something before first.
SHORT_RUN = (
    Fault(Victim.PREFILL, Phase.HANDOVER, Harm.KILL),
    Fault(Victim.JOINED_DECODE, Phase.DECODE, Harm.CUT),
    Fault(Victim.DECODE, Phase.FIRST_TOKEN, Harm.KILL),
    Fault(Victim.JOINED_PREFILL, Phase.PREFILL, Harm.STOP_SHORT),
    Fault(Victim.JOINED_PREFILL, Phase.HANDOVER, Harm.CUT),
    Fault(Victim.DECODE, Phase.DECODE, Harm.STOP_LONG),
    Fault(Victim.PREFILL, Phase.BEFORE_HELLO, Harm.KILL),
    Fault(Victim.DECODE, Phase.HANDOVER, Harm.CUT),
    Fault(Victim.JOINED_DECODE, Phase.QUEUED, Harm.KILL),
    Fault(Victim.PREFILL, Phase.PREFILL, Harm.STOP_LONG),
)


def random_fault(draw: random.Random) -> Fault:
    return Fault(draw.choice(list(Victim)), draw.choice(list(Phase)), draw.choice(list(Harm)))


# A fleet


@dataclass(slots=True)
class Fleet:
    """``keepers`` are the processes of `headwater worker`, each with a worker below it."""

    served: Served
    folder: Path
    keepers: dict[Victim, subprocess.Popen[bytes]]
    seen: set[int] = field(default_factory=set)  # pids of all processes there ever were

    def pids(self, victim: Victim) -> list[int]:
        """Of the worker; none while there is none."""
        if victim in self.keepers:
            found = children_of(self.keepers[victim].pid)
        else:
            found = [
                pid for pid in self.served.worker_pids() if f"--role={victim}" in words_of(pid)
            ]
        self.seen.update(found)
        return found

    def workers(self) -> list[dict[str, object]]:
        """As the front sees them."""
        workers: list[dict[str, object]] = json.loads(self.served.get("/pools")[1])["workers"]
        return workers

    def counts(self, role: str, name: str) -> int:
        """Of the loads of all workers of a role that are up."""
        loads = [w["load"] for w in self.workers() if w["role"] == role and w["state"] == "up"]
        return sum(load[name] for load in loads if isinstance(load, dict))

    @property
    def is_complete(self) -> bool:
        up = [w for w in self.workers() if w["state"] == "up" and w["load"] is not None]
        return len(up) == len(Victim)

    @property
    def is_all_free(self) -> bool:
        """Of the workers that are up: no block is held, and none is missing."""
        for worker in self.workers():
            load = worker["load"]
            if worker["state"] == "up" and isinstance(load, dict):
                num_free = load["num_free_blocks"] + load["num_cached_blocks"]
                if load["num_held_blocks"] or num_free != NUM_BLOCKS:
                    return False
        return True


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """One prefill and one decode worker that the front keeps, and one of each that joined."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef" * 4)
    port = free_port()
    common = (*COMMON, f"--secret-file={secret}", f"--cache-dir={folder / 'kv'}")
    with serving(
        folder, *common, *FRONT, "--prefill=1", "--decode=1", f"--control-listen={port}"
    ) as served, contextlib.ExitStack() as ends:  # fmt: skip
        keepers = {
            victim: ends.enter_context(keeper(folder, port, role, common))
            for victim, role in (
                (Victim.JOINED_PREFILL, "prefill"), (Victim.JOINED_DECODE, "decode"),
            )
        }  # fmt: skip
        made = Fleet(served, folder, keepers)
        made.seen |= {served.process.pid, *(kept.pid for kept in keepers.values())}
        served.wait_until("all four workers", lambda: made.is_complete)
        yield made


@contextlib.contextmanager
def keeper(
    folder: Path, port: int, role: str, common: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "headwater.app.cli", "worker", f"--connect=tcp://127.0.0.1:{port}",
        f"--role={role}", "--joined-silent-s=3", *common,
    ]  # fmt: skip
    with (folder / f"joined-{role}.log").open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"TMPDIR": str(folder)}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def words_of(pid: int) -> list[str]:
    """A process's command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


# Harm


def cut_connections(pid: int) -> int:
    """Shut down every TCP connection of a process; gives how many. Its listening sockets, and
    those of other families, stay."""
    num_cut = 0
    system = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                copy = system.syscall(SYS_PIDFD_GETFD, handle, int(entry.name), 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "no descriptor of another process")
                with socket.socket(fileno=copy) as found:
                    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.shutdown(socket.SHUT_RDWR)
                        num_cut += 1
    finally:
        os.close(handle)
    return num_cut


def can_cut() -> bool:
    """Whether this system lets a process have a descriptor of one that it started."""
    if not hasattr(os, "pidfd_open"):
        return False
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            listener.accept()[0].close()
            listener.settimeout(1)
            return True if child.poll() is not None else cut_connections(child.pid) >= 0
        except OSError:
            return False
        finally:
            child.kill()
            child.wait()


def inflict(fleet: Fleet, fault: Fault, draw: random.Random) -> bool:
    """False if there was nobody to do it to."""
    pids = fleet.pids(fault.victim)
    if not pids:
        return False
    pid = pids[0]
    try:
        match fault.harm:
            case Harm.KILL:
                os.kill(pid, signal.SIGKILL)
            case Harm.CUT:
                cut_connections(pid)
            case Harm.STOP_SHORT | Harm.STOP_LONG:
                is_long = fault.harm is Harm.STOP_LONG
                stopped_s = draw.uniform(3.5, 6.0) if is_long else draw.uniform(0.05, 0.8)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(pid, signal.SIGCONT)
    except OSError:  # it is gone already, or was given up and killed meanwhile
        return fault.harm is Harm.STOP_LONG
    return True


# Rounds


@dataclass(slots=True)
class Tally:
    """What became of all rounds."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    by_fault: dict[str, Counter[Verdict]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # what must never happen
    num_rounds: int = 0
    num_harmed: int = 0
    worst_free_s: float = 0.0  # from a round's last answer until every block was free
    worst_answer_s: float = 0.0


class Driver:
    """One fleet and a supply of questions whose answers are known."""

    def __init__(
        self, fleet: Fleet, questions: Sequence[Question], expected: Sequence[Answer], seed: int
    ) -> None:
        self._fleet = fleet
        self._pairs = list(zip(questions, expected, strict=True))
        self._draw = random.Random(seed)
        self.tally = Tally()

    def round(self, fault: Fault, *, at_once: int = 8) -> None:
        fleet, tally, served = self._fleet, self.tally, self._fleet.served
        tally.num_rounds += 1
        served.wait_until("readiness", lambda: is_ready(served))
        if fault.phase is Phase.BEFORE_HELLO and not self._catch_a_new_life(fault.victim):
            return
        pairs = self._draw.sample(self._pairs, at_once)
        num_tokens = [0] * at_once
        answers: dict[int, Answer] = {}

        def caller(index: int) -> None:
            def saw_token() -> None:
                num_tokens[index] += 1

            start_s = time.monotonic()
            answers[index] = ask(served, pairs[index][0], saw_token)
            tally.worst_answer_s = max(tally.worst_answer_s, time.monotonic() - start_s)

        begin = fleet.counts("prefill", "num_steps")
        threads = [
            threading.Thread(target=caller, args=(index,), daemon=True) for index in range(at_once)
        ]
        for thread in threads:
            thread.start()
        self._wait_for(fault.phase, begin, lambda: sum(num_tokens), threads)
        tally.num_harmed += inflict(fleet, fault, self._draw)
        deadline_s = time.monotonic() + ROUND_LIMIT_S
        for thread in threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        self._judge(fault, pairs, answers)
        self._wait_until_free(fault)

    def _catch_a_new_life(self, victim: Victim) -> bool:
        """Kill the worker, and wait for the process that takes its place: it is loading."""
        # All are there first: then another of its kind is, and requests are accepted.
        self._fleet.served.wait_until("all workers", lambda: self._fleet.is_complete)
        before = self._fleet.pids(victim)
        for pid in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + PHASE_LIMIT_S
        while not set(self._fleet.pids(victim)) - set(before):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        time.sleep(self._draw.uniform(0.0, 1.0))
        return True

    def _wait_for(
        self,
        phase: Phase,
        begin: int,
        num_tokens: Callable[[], int],
        threads: Sequence[threading.Thread],
    ) -> None:
        """Until the phase is reached, or can be no more."""
        reached: dict[Phase, Callable[[], bool]] = {
            Phase.PREFILL: lambda: self._fleet.counts("prefill", "num_prefilling") > 0,
            Phase.HANDOVER: lambda: self._fleet.counts("prefill", "num_steps") > begin + 2,
            Phase.FIRST_TOKEN: lambda: num_tokens() > 0,
            Phase.DECODE: lambda: num_tokens() > 40,
        }
        is_reached = reached.get(phase, lambda: True)
        deadline_s = time.monotonic() + PHASE_LIMIT_S
        while not is_reached() and any(thread.is_alive() for thread in threads):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.002)

    def _judge(
        self, fault: Fault, pairs: Sequence[tuple[Question, Answer]], answers: dict[int, Answer]
    ) -> None:
        tally = self.tally
        own = tally.by_fault.setdefault(str(fault), Counter())
        for index, (question, expected) in enumerate(pairs):
            answer = answers.get(index) or Answer(broken=f"no end within {ROUND_LIMIT_S:.0f} s")
            verdict = judge(answer, expected)
            tally.verdicts[verdict] += 1
            own[verdict] += 1
            if verdict in (Verdict.WRONG, Verdict.BROKEN, Verdict.ERROR):
                tally.failures.append(
                    f"round {tally.num_rounds}, {fault}: {verdict}\n"
                    f"{describe(question, answer, expected)}"
                )

    def _wait_until_free(self, fault: Fault) -> None:
        tally, start_s = self.tally, time.monotonic()
        while not self._fleet.is_all_free:
            if time.monotonic() - start_s > LEASE_S:
                held = [(w["worker_id"], w["load"]) for w in self._fleet.workers()]
                tally.failures.append(
                    f"round {tally.num_rounds}, {fault}: blocks are held for {LEASE_S:.0f} s: "
                    f"{held}"
                )
                return
            time.sleep(0.02)
        tally.worst_free_s = max(tally.worst_free_s, time.monotonic() - start_s)


def make_questions(folder: Path, seed: int, count: int) -> tuple[list[Question], list[Answer]]:
    """And what one worker answers that nobody disturbs."""
    questions = Questions(seed, max_prompt=900, max_output=60).some(count, share_leaving=0.15)
    whole = [Question(path=question.path, body=question.body) for question in questions]
    folder.mkdir()
    with serving(folder, *COMMON, "--both=1", "--cache-dir=none") as served:
        return questions, ask_all(served, whole, at_once=4)


# What is left


@dataclass(frozen=True, slots=True)
class Standing:
    """What the front has open. Things that only grow are leaks."""

    num_threads: int
    num_files: int

    @staticmethod
    def of(pid: int) -> Standing:
        folder = Path(f"/proc/{pid}")
        return Standing(
            len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))
        )


LIFELINE_LIMIT_S = 15.0


def leftovers(fleet: Fleet, shared_memory: set[str]) -> list[str]:
    """Once all was ended: processes, run folders and shared memory that are still there.
    ``shared_memory`` is what was there before.

    A worker that was being started while the front ended is seen to end by itself: it has
    to come as far as reading its lifeline.
    """
    end_s = time.monotonic() + LIFELINE_LIMIT_S
    while any(is_alive(pid) for pid in fleet.seen) and time.monotonic() < end_s:
        time.sleep(0.1)
    left = [f"process {pid}: {words_of(pid)[:6]}" for pid in fleet.seen if is_alive(pid)]
    left += [f"run folder {path}" for path in fleet.folder.glob("headwater-*")]
    marks = {"headwater", *map(str, fleet.seen)}
    left += [
        f"shared memory {name}"
        for name in files_in_shared_memory() - shared_memory
        if any(mark in name for mark in marks)
    ]
    return left


def files_in_shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
