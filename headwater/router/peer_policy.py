"""Whether a worker may join: it must serve exactly what the others serve. Pure (D06)."""

from __future__ import annotations

from headwater.core.control import PROTOCOL_VERSION, Hello
from headwater.core.fleet import Holding, Role


def protocol_mismatch(hello: Hello) -> str | None:
    """Why this front cannot understand the worker, both versions named."""
    if hello.protocol_version == PROTOCOL_VERSION:
        return None
    return (
        f"worker speaks protocol {hello.protocol_version}, the front {PROTOCOL_VERSION}; "
        "start both from one installation"
    )


def role_mismatch(hello: Hello, role: Role) -> str | None:
    """Why the worker is not what was launched."""
    if hello.role is not role:
        return f"worker {hello.worker_id} has role {hello.role}, the front wants {role}"
    if role is Role.DECODE and not hello.handoff_address:
        return (
            f"worker {hello.worker_id} has role {role} and says no address where it takes KV; "
            "start both from one installation"
        )
    if hello.holds is not Holding.ALL and role is not Role.PREFILL:
        return (
            f"worker {hello.worker_id} has role {role} and holds only the {hello.holds} part of "
            "its model, which gives no output; start it with --prefill-weights all"
        )
    return None


def model_mismatch(hello: Hello, first: Hello) -> str | None:
    """Why the worker cannot serve beside ``first``: the field that differs, with both values."""
    ours, theirs = first.info, hello.info
    for name, want, got in (
        ("model fingerprint", ours.fingerprint, theirs.fingerprint),
        ("KV layout", ours.layout, theirs.layout),
        ("weights format", ours.weights_format, theirs.weights_format),
        ("KV bytes per token", ours.kv_bytes_per_token, theirs.kv_bytes_per_token),
        ("block_tokens", ours.block_tokens, theirs.block_tokens),
        ("window_tokens", ours.window_tokens, theirs.window_tokens),
        ("alignment", ours.alignment, theirs.alignment),
        ("decoder_replay_tokens", ours.decoder_replay_tokens, theirs.decoder_replay_tokens),
        ("context_tokens", ours.context_tokens, theirs.context_tokens),
        ("numerics", ours.numerics, theirs.numerics),
        ("vocab_size", ours.vocab_size, theirs.vocab_size),
    ):
        if want != got:
            return (
                f"worker {hello.worker_id} serves {name} {got}, the front serves {want}; "
                "start all workers with the same model and settings, or restart the server"
            )
    return None
