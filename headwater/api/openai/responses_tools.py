"""The tools of a Responses body: functions, functions in namespaces, and tools servers run.

A model knows one flat list of functions, so a function of a namespace is shown
to it as ``NAMESPACE__NAME``, and its calls are sent back under both names:

    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "find"}]}
    model: files__find    caller: {"name": "find", "namespace": "files"}

Searching the web is offered by some agents in every request, to any server. It
is left out, which the echoed tools and the log tell; strict mode refuses it.
Every other tool that a server would have to run is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headwater.api.decode import unsupported
from headwater.api.history import check_tools, make_tool, required
from headwater.api.openai.responses_bodies import ToolBody
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Tool

OFFERED_TO_ANYONE: Final = frozenset({"web_search", "web_search_preview"})
_SEPARATOR: Final = "__"


@dataclass(frozen=True, slots=True)
class CallName:
    """A function as the caller names it."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """What the model is shown, what the caller is told of it, and the names of both."""

    tools: tuple[Tool, ...] = ()
    echoed: tuple[ToolBody, ...] = ()
    left_out: tuple[str, ...] = ()  # types of the tools that are not served
    _names: dict[str, CallName] = field(default_factory=dict)

    def callers_name(self, name: str) -> CallName:
        """For the name that the model wrote; a name that was not offered stays as it is."""
        return self._names.get(name) or CallName(name)


def offered_tools(bodies: Sequence[ToolBody], *, strict: bool) -> OfferedTools:
    """Raises InvalidRequest naming the tool."""
    tools: list[Tool] = []
    echoed: list[ToolBody] = []
    left_out: list[str] = []
    names: dict[str, CallName] = {}
    for index, body in enumerate(bodies):
        if body.type in OFFERED_TO_ANYONE and not strict:
            left_out.append(body.type)
            continue
        echoed.append(body)
        for function, namespace, where in _functions(body, f"tools[{index}]"):
            name = required(function.name, f"{where}.name")
            tools.append(_tool(function, model_name(name, namespace), where))
            names[tools[-1].name] = CallName(name, namespace)
    check_tools(tools, "tools")
    return OfferedTools(
        tools=tuple(tools), echoed=tuple(echoed), left_out=tuple(left_out), _names=names
    )


def model_name(name: str, namespace: str | None) -> str:
    """
    >>> model_name("find", "files"), model_name("find", None)
    ('files__find', 'find')
    """
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def _functions(body: ToolBody, where: str) -> Iterator[tuple[ToolBody, str | None, str]]:
    """Each function in ``body``, its namespace, and its place."""
    match body.type:
        case "function":
            yield body, None, where
        case "namespace":
            namespace = required(body.name, f"{where}.name")
            if isinstance(body.tools, msgspec.UnsetType):
                raise InvalidRequest(
                    f"missing required field '{where}.tools'",
                    param=f"{where}.tools",
                    code="missing_required_parameter",
                )
            for index, inner in enumerate(body.tools):
                place = f"{where}.tools[{index}]"
                if inner.type != "function":
                    raise unsupported(f"{place}.type", f"{place}: a tool other than a function")
                yield inner, namespace, place
        case _:
            raise unsupported(f"{where}.type", f"{where}: a tool other than a function")


def _tool(body: ToolBody, name: str, where: str) -> Tool:
    return make_tool(
        name=name,
        description=body.description,
        parameters=body.parameters,
        strict=bool(body.strict),
        where=where,
    )
