"""The names under which the one loaded model answers, in every dialect."""

from __future__ import annotations

from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.failure import FailureKind, Refused, refused
from headwater.core.errors import InvalidRequest
from headwater.core.request import ModelInfo


def served_names(config: ApiConfig, info: ModelInfo) -> tuple[str, ...]:
    """Names under which the one loaded model answers; the first is the default."""
    return config.served_names or (info.model_id,)


def check_model(name: str | None, facts: CallFacts, config: ApiConfig) -> str:
    """The name to answer with. Without one the only model is meant, but not in strict mode."""
    names = served_names(config, facts.info)
    if name is None:
        if config.strict:
            raise InvalidRequest(
                "missing required field 'model'", param="model", code="missing_required_parameter"
            )
        return names[0]
    if name not in names:
        raise no_model(names)
    return name


def no_model(names: tuple[str, ...]) -> Refused:
    """The error for a name that is not among ``names``."""
    # The name asked for is not repeated: it may be anything.
    return refused(
        404,
        FailureKind.NOT_FOUND,
        f"the model does not exist here; served: {', '.join(names)}",
        param="model",
        code="model_not_found",
    )
