"""The router's settings as values. ``app`` builds them; knows no files and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.core.errors import ConfigError
from headwater.core.fleet import Role
from headwater.router.buckets_policy import BucketShares
from headwater.router.dispatch import DispatchConfig
from headwater.router.elastic_policy import ElasticLimits
from headwater.router.fleet import FleetConfig
from headwater.router.policy import AdmissionLimits
from headwater.router.prefill_policy import PrefillLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """``roles``: the workers to keep alive. A fleet of one fails what its worker held when it
    is lost; any other goes on with it: ``max_attempts`` placements per request, and for as
    long as ``recover_within_s`` without workers for it. Without ``elastic``, workers of role
    BOTH always do both."""

    roles: tuple[Role, ...] = (Role.BOTH,)
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    shares: BucketShares = field(default_factory=BucketShares)
    prefill: PrefillLimits = field(default_factory=PrefillLimits)
    elastic: ElasticLimits | None = None
    start_limit_s: float = 600.0  # from launch to Hello; over it the worker is given up
    stuck_after_s: float = 30.0  # pending work without a step for so long: not ready
    lost_after_s: float = 60.0  # the same, and the worker is replaced where others go on
    backoff_first_s: float = 0.5
    backoff_max_s: float = 30.0
    max_attempts: int = 4
    recover_within_s: float = 120.0
    watch_every_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"router.max_attempts must be >= 1, got {self.max_attempts}")
        if self.lost_after_s < self.stuck_after_s:
            raise ConfigError(
                f"router.lost_after_s ({self.lost_after_s}) must be >= "
                f"router.stuck_after_s ({self.stuck_after_s})"
            )

    @property
    def fleet(self) -> FleetConfig:
        return FleetConfig(
            roles=self.roles,
            start_limit_s=self.start_limit_s,
            backoff_first_s=self.backoff_first_s,
            backoff_max_s=self.backoff_max_s,
        )

    @property
    def dispatch(self) -> DispatchConfig:
        return DispatchConfig(
            shares=self.shares,
            prefill=self.prefill,
            max_running_sequences=self.limits.max_running_sequences,
        )
