"""Gives a worker its doors for KV of other workers, by its role.

prefill: a sender      decode: a receiver, at an address that the front is told
both:    neither; with ``fleet.elastic`` it may act as either, and has both doors
"""

from __future__ import annotations

from headwater.app.fleet_plan import plan_handoff_endpoint
from headwater.app.joined_worker import worker_secret
from headwater.app.settings import Settings
from headwater.core.cache import KVPart
from headwater.core.fleet import Holding, Role
from headwater.core.ports import BlockMemory, Clock
from headwater.core.request import ModelInfo
from headwater.transfer.handoff_receiver import HandoffReceiver
from headwater.transfer.handoff_sender import HandoffSender
from headwater.transfer.peer import FleetKeys, PeerContract
from headwater.worker.handover import HandoverParts


def open_handovers(
    settings: Settings,
    role: Role,
    info: ModelInfo,
    layout: str,
    memory: BlockMemory,
    clock: Clock,
    holds: Holding = Holding.ALL,
) -> HandoverParts | None:
    """None for a worker that only does whole requests. ``layout`` is the cache identity's.

    Raises ConfigError without a usable secret, or when its address cannot be listened on.
    """
    is_either = role is Role.BOTH and settings.fleet.elastic
    gives, takes = role is Role.PREFILL or is_either, role is Role.DECODE or is_either
    if not (gives or takes):
        return None
    contract = PeerContract(
        model_fingerprint=info.fingerprint,
        layout=layout,
        block_tokens=info.block_tokens,
        window_tokens=info.window_tokens,
        global_bytes=memory.part_bytes(KVPart.GLOBAL),
        window_bytes=memory.part_bytes(KVPart.WINDOW),
        alignment=info.alignment,
        decoder_replay_tokens=info.decoder_replay_tokens,
    )
    keys = FleetKeys.of(worker_secret(settings))
    bind = plan_handoff_endpoint(settings.worker.handoff_listen)
    return HandoverParts(
        part_bytes=memory.part_bytes,
        sender=HandoffSender(contract, memory, keys, clock) if gives else None,
        receiver=HandoffReceiver(contract, memory, keys, clock, bind=bind) if takes else None,
        holds=holds,
        alignment=info.alignment,
        decoder_replay_tokens=info.decoder_replay_tokens,
    )
