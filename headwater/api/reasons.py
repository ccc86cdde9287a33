"""Why a hit ended, one sentence a reason: for answers, for the command line, for the page.

``docs/cache.md`` has the same sentences, and a test compares. Knows no request.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from headwater.core.cache import MissReason
from headwater.core.request import PromptReport

REASON_TEXTS: Final = MappingProxyType(
    {
        MissReason.NONE: "All of the prompt but its last token was a hit.",
        MissReason.NEW: "Nothing that is kept goes further than this.",
        MissReason.DIFFERS: "What is kept goes on with another token at exactly this place.",
        MissReason.NO_WINDOW: (
            "More is kept, but not what layers with a window need there: the hit ends at the "
            "last end of an input or output."
        ),
        MissReason.TOO_SHORT: (
            "Less than one block is shared with anything that is kept, or less than one would be "
            "spared, since the prompt's end is computed in any case."
        ),
        MissReason.EXPIRED: "It was kept, and not used again within its retention.",
        MissReason.EVICTED: "It was kept, and had to make room for other prefixes.",
        MissReason.OTHER_MODEL: (
            "It is kept under other weights, another configuration, other numerics or another "
            "layout."
        ),
        MissReason.OTHER_TENANT: "It is kept for another tenant, and no tenant sees another's.",
        MissReason.SLOW: "It is kept, and computing it again was faster than loading it.",
        MissReason.DAMAGED: "It was kept, and did not pass its checks: it is removed.",
        MissReason.UNAVAILABLE: "The store did not answer in time, so it was computed.",
        MissReason.ASKED: "The request wants logprobs of its prompt, so the prompt is computed.",
    }
)


def told(report: PromptReport) -> PromptReport:
    """``report`` as a caller may see it: nothing tells that another tenant exists (C12).

    Workers say NEW already where a report leaves them; this holds if one does not.
    """
    if report.cache is None or report.cache.reason is not MissReason.OTHER_TENANT:
        return report
    return replace(report, cache=replace(report.cache, reason=MissReason.NEW))
