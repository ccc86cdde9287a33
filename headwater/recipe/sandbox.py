"""Where chat templates run: jinja's immutable sandbox, bounded, with origins kept.

jinja forbids what is unsafe (names that begin with an underscore, changing the
caller's values, loading other templates). This adds a meter (``sandbox_limits``),
a list of allowed filters and methods (``sandbox_filters``), and code generation
in which every literal of the template is placed text (``provenance``). Knows
nothing of messages or tokens; used by ``template`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context

from headwater.recipe.provenance import Traced, joined, placed
from headwater.recipe.sandbox_filters import (
    STRING_METHODS,
    MeteredEnvironment,
    allowed_filters,
    allowed_functions,
    charge_replace,
    check_format,
)
from headwater.recipe.sandbox_limits import LimitExceeded, Meter, TemplateLimits

_MAX_NUMBER_BITS = 4096


class _OriginCodeGenerator(CodeGenerator):
    """Compiles string literals to placed text, and counts loop turns and containers."""

    def _literal(self, text: str) -> str:
        environment = self.environment
        assert isinstance(environment, TemplateEnvironment)
        return f"environment.literals[{environment.literal_index(text)}]"

    def _output_const_repr(self, group: Iterable[object]) -> str:
        return self._literal("".join(map(str, group)))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._charged(lambda: super(_OriginCodeGenerator, self).visit_List(node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._charged(lambda: super(_OriginCodeGenerator, self).visit_Dict(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._charged(lambda: super(_OriginCodeGenerator, self).visit_Tuple(node, frame))
        else:  # the target of an assignment or a loop
            super().visit_Tuple(node, frame)

    def _charged(self, write_container: Callable[[], None]) -> None:
        self.write("environment.charged(")
        write_container()
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        if node.recursive:
            self.fail("recursive loops are not supported in chat templates", node.lineno)
        # counted() is the environment's: every loop runs over it.
        node.iter = nodes.Call(
            nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None, lineno=node.lineno
        )
        super().visit_For(node, frame)


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; for serving it is plain."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateEnvironment(MeteredEnvironment):
    """One template's environment; ``metered`` gives the copy for one rendering."""

    code_generator_class = _OriginCodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime], limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding would turn lists of literals into values without origins.
            optimized=False,
            extensions=[_GenerationTag, loopcontrols],
        )
        self.meter = limits.meter(0, 0)  # for what jinja evaluates while it compiles
        self.literals: list[Traced] = []
        self.filters.clear()
        self.filters.update(allowed_filters())
        self.globals.clear()
        self.globals.update(allowed_functions(now))

    def metered(self, meter: Meter) -> TemplateEnvironment:
        environment = self.overlay()
        environment.meter = meter
        environment.globals = {**self.globals, "range": environment.bounded_range}
        return environment

    def literal_index(self, text: str) -> int:
        self.literals.append(placed(text))
        return len(self.literals) - 1

    def run(self, code: CodeType, values: Mapping[str, object]) -> Traced:
        """The output of a compiled template; raises whatever the template raises."""
        template = jinja2.Template.from_code(self, code, self.make_globals(None))
        context = template.new_context(dict(values))
        return self.concat(template.root_render_func(context))

    # -- called by the compiled template -----------------------------------------------

    def concat(self, parts: Iterable[str]) -> Traced:
        """Everything printed is joined here."""
        return joined(self._charged_strings(parts))

    def _charged_strings(self, parts: Iterable[str]) -> Iterator[str]:
        for part in parts:
            self.meter.string(part)
            yield part

    def charged(self, container: object) -> object:
        self.meter.value(container)
        return container

    def bounded_range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.meter.step(len(numbers))
        return numbers

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._charged_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def _charged_method(self, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.meter.string(owner)
        if name == "join" and args:
            parts = list(self._charged_strings(args[0]))
            self.meter.text(len(owner) * len(parts))
            return (parts, *args[1:])
        if name == "replace" and len(args) > 1:
            charge_replace(self, owner, str(args[0]), str(args[1]))
        return args

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.step()
        if operator == "%":
            check_format(left)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sized) and isinstance(times, int) and times > 0:
                    self.meter.text(len(value) * times)
        elif isinstance(left, str | list | tuple):
            for value in (left, right):
                if isinstance(value, str):
                    self.meter.string(value)
                else:
                    self.meter.value(value)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1)
            if bits + right.bit_length() > _MAX_NUMBER_BITS:
                raise LimitExceeded("the chat template makes too large a number")
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # str.format is not an allowed method, so nothing needs wrapping

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STRING_METHODS
        if isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)
