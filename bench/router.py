"""How many placements the router decides per second, without any worker.

    python -m bench.router

64 workers (as one pool that does both, and as 16 that prefill and 48 that decode), 10,000
sequences running, a new request for each that ends. A request has 2,048 tokens of which
three quarters are a prefix that some workers hold. A decision is all that the router does
for one request but sending: keys and prefix map, buckets, choices, books, and its end.
Workers' messages are counted apart: one is a load, a step's tokens and 32 outputs.
Seconds are the processor's; the median of slices is told, and the best.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from random import Random

from headwater.core.blocks import CacheIdentity, block_keys
from headwater.core.control import WorkerLoad
from headwater.core.cost import StepCost
from headwater.core.fleet import KVEvents, Role
from headwater.core.request import ModelInfo, Request, RequestId, SamplingParams, StopParams
from headwater.router.dispatch import Ask, DispatchConfig, Dispatcher, Placement

NUM_ACTIVE = 10_000
NUM_SLICES = 20
SLICE = 1000  # decisions, then messages, timed together
NUM_PREFIXES = 64
PROMPT_TOKENS = 2048
PREFIX_TOKENS = 1536
BLOCK_TOKENS = 32
COST = StepCost(base_s=0.01, token_s=2e-5, pair_s=1e-10, window_pair_s=0.0, sequence_s=1e-4)
INFO = ModelInfo(
    model_id="m", family="llama", fingerprint="f", vocab_size=9, context_tokens=131072,
    block_tokens=BLOCK_TOKENS, num_blocks=40_000, kv_bytes_per_token=4, weights_format="bf16",
    weights_bytes=1, numerics="reference", device="cpu", layout="l",
)  # fmt: skip
LOAD = WorkerLoad(
    num_waiting=0, num_prefilling=0, num_decoding=0, num_free_blocks=0, num_cached_blocks=0,
    num_held_blocks=10_000, num_steps=0, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=0, num_miss_tokens=0, num_output_tokens=0, cost=COST,
)  # fmt: skip


class Fleet:
    """The dispatcher, and requests that start and end as fast as it decides."""

    def __init__(self, roles: list[Role]) -> None:
        self.random = Random(1)
        self.dispatcher = Dispatcher(INFO, DispatchConfig(max_running_sequences=512))
        self.running: deque[Placement] = deque()
        self.now_s = 0.0
        self.num_asked = 0
        self.prefixes = [
            tuple(self.random.randrange(1 << 17) for _ in range(PREFIX_TOKENS))
            for _ in range(NUM_PREFIXES)
        ]
        for number, role in enumerate(roles):
            name = f"{role}-{number}"
            self.dispatcher.join(name, role, INFO, 0.0)
            self.dispatcher.told(name, LOAD)
            if role is not Role.DECODE:
                for prefix in self.random.sample(self.prefixes, 16):
                    self.learn(name, prefix)

    def learn(self, name: str, tokens: tuple[int, ...]) -> None:
        root = CacheIdentity(INFO.fingerprint, INFO.layout).root_key()
        keys = tuple(key for key, _ in block_keys(root, tokens, BLOCK_TOKENS))
        self.dispatcher.learned(name, KVEvents(added=keys))

    def make_requests(self, count: int) -> list[Request]:
        """Made beforehand: what a caller's prompt costs to build is not the router's."""
        made = []
        for _ in range(count):
            self.num_asked += 1
            prefix = self.prefixes[self.num_asked % NUM_PREFIXES]
            own = range(self.num_asked, self.num_asked + PROMPT_TOKENS - PREFIX_TOKENS)
            made.append(
                Request(
                    request_id=RequestId(f"r{self.num_asked}"),
                    prompt_tokens=(*prefix, *own),
                    sampling=SamplingParams(),
                    stop=StopParams(max_output_tokens=512),
                    tenant="",
                )
            )
        return made

    def decide(self, request: Request) -> None:
        self.now_s += 1e-3
        self.dispatcher.add(
            Ask(key=str(request.request_id), request=request, num_choices=1), self.now_s
        )
        placement = self.dispatcher.next(self.now_s)
        if placement is None:
            raise SystemExit("nobody can be placed: the bench asks for too much")
        computing = placement.prefill_id or placement.decode_id
        self.dispatcher.computed(computing, PROMPT_TOKENS)
        if placement.prefill_id is not None:
            self.dispatcher.ended(placement.prefill_id, placement.key)
        self.dispatcher.settled(placement.decode_id, placement.key)
        self.dispatcher.prefilled(placement.decode_id, placement.key)
        self.running.append(placement)

    def end_oldest(self) -> None:
        placement = self.running.popleft()
        self.dispatcher.ended(placement.decode_id, placement.key)
        self.dispatcher.finished(256)

    def hear(self, name: str) -> None:
        """One worker's message."""
        self.dispatcher.told(name, LOAD)
        self.dispatcher.computed(name, 64)
        for key in list(self.dispatcher.books[name].parts)[:32]:
            self.dispatcher.settled(name, key)
            self.dispatcher.grew(name, key, 1)
        self.dispatcher.next(self.now_s)


def bench(name: str, roles: list[Role]) -> None:
    fleet = Fleet(roles)
    for request in fleet.make_requests(NUM_ACTIVE):
        fleet.decide(request)
    names = list(fleet.dispatcher.books)
    decided_s, heard_s = [], []
    for _ in range(NUM_SLICES):
        requests = fleet.make_requests(SLICE)
        start_s = time.process_time()
        for request in requests:
            fleet.decide(request)
            fleet.end_oldest()
        decided_s.append(time.process_time() - start_s)
        start_s = time.process_time()
        for number in range(SLICE):
            fleet.hear(names[number % len(names)])
        heard_s.append(time.process_time() - start_s)
    decided, heard = statistics.median(decided_s), statistics.median(heard_s)
    print(
        f"{name:24} {SLICE / decided:6.0f} decisions/s (best {SLICE / min(decided_s):6.0f})"
        f"  {1e6 * decided / SLICE:5.0f} us each  {SLICE / heard:7.0f} messages/s"
    )


def main() -> None:
    print(f"64 workers, {NUM_ACTIVE} sequences running, prompts of {PROMPT_TOKENS} tokens")
    bench("64 that do both", [Role.BOTH] * 64)
    bench("16 prefill, 48 decode", [Role.PREFILL] * 16 + [Role.DECODE] * 48)


if __name__ == "__main__":
    main()
