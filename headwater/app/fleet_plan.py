"""Which workers one machine starts, and what each of them gets of it. Pure.

2 workers on 8 cores and 10 GiB free: 4 threads and half of the default KV each
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.errors import ConfigError
from headwater.core.fleet import Holding, Role

# Below this, each half of a split has too few threads to be worth a second copy of the weights.
MIN_SPLIT_CORES = 16


def plan_roles(both: int | None, prefill: int, decode: int, *, may_join: bool) -> tuple[Role, ...]:
    """One role per worker to start. ``both`` None: one, unless others were asked for.

    >>> [role.value for role in plan_roles(None, 1, 2, may_join=False)]
    ['prefill', 'decode', 'decode']

    Raises ConfigError for a fleet that could serve nobody; with ``may_join`` none at all is
    a fleet, too: of those who will come.
    """
    num_both = both if both is not None else (0 if prefill or decode else 1)
    if not num_both and bool(prefill) != bool(decode):
        have, lack = ("prefill", "decode") if prefill else ("decode", "prefill")
        raise ConfigError(
            f"fleet.{have} workers need at least one fleet.{lack} worker beside them "
            f"(--{lack} 1), or one that does both (--both 1)"
        )
    if not (num_both or prefill or decode or may_join):
        raise ConfigError(
            "fleet.both is 0 and no other worker is asked for; ask for one, "
            "or let workers join with --control-listen"
        )
    return (Role.PREFILL,) * prefill + (Role.DECODE,) * decode + (Role.BOTH,) * num_both


def plan_holding(role: Role, prefill_weights: str, *, decoder_replay: bool) -> Holding:
    """What a worker keeps of its model: with decoder replay no token of a prefill worker goes
    through the late layers. Of a model without any, the early part is all of it.

    >>> plan_holding(Role.PREFILL, "auto", decoder_replay=True).value
    'early'
    """
    is_spared = role is Role.PREFILL and decoder_replay and prefill_weights == "auto"
    return Holding.EARLY if is_spared else Holding.ALL


def share_threads(num_cores: int, num_workers: int) -> int:
    """Threads of each worker where nobody said how many."""
    return max(1, num_cores // max(num_workers, 1))


def plan_endpoint(address: str, setting: str) -> str:
    """``7000`` (loopback), ``HOST:7000`` or ``[IPV6]:7000`` as a zmq endpoint to listen on.

    >>> plan_endpoint("7000", "x"), plan_endpoint("[::1]:0", "x")
    ('tcp://127.0.0.1:7000', 'tcp://[::1]:*')
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535 or (":" in host) != (host[:1] == "["):
        raise ConfigError(f"{setting} must be PORT, HOST:PORT or [IPV6]:PORT, got {address!r}")
    return f"tcp://{host or '127.0.0.1'}:{'*' if int(port) == 0 else int(port)}"


def plan_handoff_endpoint(address: str | None) -> str:
    """Where a decode worker takes KV. Others are told this very address, so it must be one.

    >>> plan_handoff_endpoint(None)
    'tcp://127.0.0.1:*'
    """
    if address is None:
        return "tcp://127.0.0.1:*"
    endpoint = plan_endpoint(address, "worker.handoff_listen")
    if endpoint.startswith(("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")):
        raise ConfigError(
            f"worker.handoff_listen {address} is every address of this machine; name the one "
            "that the prefill workers reach"
        )
    return endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAdvice:
    """What to start here, as flags, and why."""

    flags: str
    why: str


def advise_fleet(
    *, num_cores: int, is_accelerator: bool, weights_bytes: int, prefill_bytes: int, free_bytes: int
) -> FleetAdvice:
    """The default for a machine. Two workers on one device share what it computes, so a split
    there buys even streams, not throughput; a step budget buys the same for one worker.
    ``prefill_bytes``: what a prefill worker keeps of the weights."""
    times = "twice"
    if prefill_bytes < weights_bytes:
        times = f"{1 + prefill_bytes / weights_bytes:.1f} times"
    if is_accelerator:
        return FleetAdvice(
            flags="--both 1",
            why=f"one device: two workers would share its compute and hold its weights {times}",
        )
    if num_cores < MIN_SPLIT_CORES:
        return FleetAdvice(
            flags="--both 1",
            why=f"{num_cores} cores: a split would leave each side {share_threads(num_cores, 2)} "
            f"and hold the weights {times}; the step budget keeps streams even",
        )
    if weights_bytes + prefill_bytes > free_bytes // 2:
        return FleetAdvice(
            flags="--both 1", why=f"the weights held {times} would take the room of the KV"
        )
    return FleetAdvice(
        flags="--both 1",
        why="the step budget keeps streams even; --prefill 1 --decode 1 is worth a try here "
        f"({share_threads(num_cores, 2)} threads each) where long prompts never stop coming",
    )
