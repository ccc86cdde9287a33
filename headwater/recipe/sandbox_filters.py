"""The filters, methods and global functions that a chat template may use.

A list of what is allowed, not of what is forbidden: a single ``x|center(10**9)``
or ``(1).to_bytes(10**9)`` asks for any amount of memory. Everything here is
bounded by the rendering's meter and keeps the origins of text where it can.
``sandbox`` installs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from headwater.recipe.provenance import Traced, placed, spans_of
from headwater.recipe.provenance_json import traced_json
from headwater.recipe.sandbox_limits import LimitExceeded, Meter

# Functions whose types are jinja's business: a filter takes and returns anything.
Function = Callable[..., Any]

STRING_METHODS = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"),
        *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
        *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("title", "upper"),
    }
)
_JINJA_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string"),
    *("title", "trim", "unique", "upper"),
)

# Filters that do not look into the items of a list, and those that at most copy it.
# Templates ask for ``messages|length`` once for every message: that must not be
# charged with the text of all messages each time.
_LOOKING_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
_COPYING_FILTERS = frozenset({"items", "list", "reverse"})

_MAX_INDENT = 256
_MAX_DATE_FORMAT = 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # %100000d, or %*d from a value


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """What the filters need of the environment that they run in."""

    meter: Meter

    def counted(self, values: Iterable[object]) -> Iterator[object]:
        """``values``, each of them a step."""
        for value in values:
            self.meter.step()
            yield value


class Refused(TemplateError):
    """The template called raise_exception; ``reason`` keeps the origins of its text."""

    def __init__(self, reason: str) -> None:
        super().__init__("the chat template refused the messages")
        self.reason = reason


def allowed_filters() -> dict[str, Function]:
    filters = {name: _metered(name) for name in _JINJA_FILTERS}
    filters.update(indent=_indent, join=_join, replace=_replace, sum=_sum, tojson=_tojson)
    return filters


def allowed_functions(now: Callable[[], datetime]) -> dict[str, Function]:
    """Globals; ``range`` needs the meter and is added by the environment."""

    def strftime_now(form: str) -> Traced:
        # Some C libraries take a width between % and the letter.
        if len(form) > _MAX_DATE_FORMAT or re.search(r"%[^a-zA-Z%]*\d", form):
            raise LimitExceeded("the chat template has too long or too wide a date format")
        return placed(now().strftime(str.__str__(form)))

    return {
        "dict": _dict,
        "namespace": TemplateNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
    }


def check_format(text: object) -> None:
    """Refuse a ``%`` format that could make a string much longer than its arguments."""
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise LimitExceeded("the chat template formats to too great a width")


class TemplateNamespace(Namespace):
    """jinja's namespace, without names that jinja or Python give a meaning to."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Positional only, so that a template may say namespace(self=...).
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # jinja's shows the contents, which may refer to each other


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace attribute must not begin with an underscore")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise Refused(message if isinstance(message, str) else str(message))


def _environment(context: Context) -> MeteredEnvironment:
    environment = context.environment
    assert isinstance(environment, MeteredEnvironment)  # they are installed nowhere else
    return environment


def _metered(name: str) -> Function:
    """jinja's filter ``name``, charging for its value before it works on it.

    It takes the context, which also keeps jinja from running it while it compiles.
    """
    function = FILTERS[name]
    takes = getattr(function, "jinja_pass_arg", None)
    takes_name = takes.name if takes is not None else ""

    @pass_context
    @wraps(function, updated=())
    def metered(context: Context, value: object, *args: object, **kwargs: object) -> object:
        meter = _environment(context).meter
        if name in _LOOKING_FILTERS and not isinstance(value, str):
            meter.step()
        elif name in _COPYING_FILTERS and isinstance(value, list | tuple | dict):
            meter.step(len(value))
        else:
            meter.value(value)
        match takes_name:
            case "context":
                return function(context, value, *args, **kwargs)
            case "eval_context":
                return function(context.eval_ctx, value, *args, **kwargs)
            case "environment":
                return function(context.environment, value, *args, **kwargs)
            case _:
                return function(value, *args, **kwargs)

    return metered


@pass_context
def _join(
    context: Context, value: Iterable[object], d: str = "", attribute: str | int | None = None
) -> str:
    environment = _environment(context)
    items = list(environment.counted(value))
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    texts = [str(item) for item in items]
    environment.meter.text(len(d) * len(texts))
    for text in texts:
        environment.meter.string(text)
    return Traced(d, spans_of(d)).join(texts)


@pass_context
def _replace(
    context: Context, value: object, old: object, new: object, count: int | None = None
) -> str:
    text, old_text, new_text = str(value), str(old), str(new)
    charge_replace(_environment(context), text, old_text, new_text)
    return text.replace(old_text, new_text, -1 if count is None else count)


def charge_replace(environment: MeteredEnvironment, text: str, old: str, new: str) -> None:
    environment.meter.string(text)
    environment.meter.text(text.count(old) * len(new))


@pass_context
def _indent(
    context: Context, value: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    """Indent all lines but the first (unless ``first``) and the empty ones (unless ``blank``)."""
    indention = width if isinstance(width, str) else placed(" " * min(width, _MAX_INDENT))
    lines = (value + "\n").splitlines()
    meter = _environment(context).meter
    meter.string(value)
    meter.text(len(lines) * len(indention))
    shown = [
        indention + line if (line or blank) and (index or first) else line
        for index, line in enumerate(lines)
    ]
    return placed("\n").join(shown)


@pass_context
def _sum(
    context: Context,
    value: Iterable[object],
    attribute: str | int | None = None,
    start: float = 0,
) -> float:
    """Of numbers only: summing lists would copy them once for each of them."""
    environment = _environment(context)
    items = list(environment.counted(value))
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    total = start
    for item in items:
        if not isinstance(item, int | float):
            raise TypeError("only numbers can be summed")
        total += item
    return total


@pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face templates expect it: nothing is escaped for HTML."""
    meter = _environment(context).meter
    meter.value(value)
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise LimitExceeded("the chat template indents JSON too far")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    meter.text(len(text))
    return traced_json(text, value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
