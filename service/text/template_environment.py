"""The Jinja environment chat templates run in: what Hugging Face templates expect, in a sandbox, bounded.

A template comes with the model, the data it reads from clients. Neither may reach the interpreter (Jinja's
immutable sandbox), hang it (a budget of operations and seconds) or fill its memory (bounded products and
output).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may cost. A conversation of 10,000 messages needs ~200,000 operations."""

    operations: int = 5_000_000
    """Attribute look-ups, item look-ups and calls."""
    seconds: float = 10.0
    output_chars: int = 32 * 2**20
    repeat_chars: int = 2**20
    """Longest string or list that `*` and string formatting may make."""


class BudgetExceeded(jinja2.TemplateError):
    """A rendering went over its limits."""


class RenderBudget:
    """What is left of one rendering's limits."""

    _CHECK_TIME_EVERY = 1024

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._operations_left = limits.operations
        self._deadline = time.monotonic() + limits.seconds

    def spend(self) -> None:
        """One operation. Raises BudgetExceeded."""
        self._operations_left -= 1
        if self._operations_left < 0:
            raise BudgetExceeded(f"rendering takes more than {self.limits.operations} operations")
        if self._operations_left % self._CHECK_TIME_EVERY == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raises BudgetExceeded."""
        if time.monotonic() > self._deadline:
            raise BudgetExceeded(f"rendering takes longer than {self.limits.seconds:g} s")


_budget: ContextVar[RenderBudget | None] = ContextVar("render_budget", default=None)


@contextmanager
def bounded(limits: RenderLimits) -> Iterator[RenderBudget]:
    """Whatever templates run within, in this thread, spends from one budget."""
    budget = RenderBudget(limits)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Makes and runs chat templates; safe to share between threads."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Templates are few and kept compiled by their owner.
            cache_size=0,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # text of any length, in one call

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = super()._parse(source, name, filename)
        return _Metering().visit(template)  # type: ignore[no-any-return]

    def turn(self) -> None:
        """Called in each turn of a loop: calls are what the budget counts."""

    def join(self, *parts: Any) -> str:
        """What `~` does."""
        texts = [str(part) for part in parts]
        _check_length(sum(len(text) for text in texts))
        return "".join(texts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _spend()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend()
        if isinstance(getattr(obj, "__self__", None), str):  # "a".ljust(3_000_000_000)
            for argument in args:
                if isinstance(argument, int):
                    _check_length(argument)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _spend()
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _spend() -> None:
    budget = _budget.get()
    if budget is not None:
        budget.spend()


class _Metering(jinja2.visitor.NodeTransformer):
    """Sends through the environment what costs time or memory and would otherwise pass it by."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("turn"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        join = jinja2.nodes.EnvironmentAttribute("join")
        return jinja2.nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


def _limits() -> RenderLimits:
    budget = _budget.get()
    return budget.limits if budget is not None else RenderLimits()


def _check_length(length: int) -> None:
    most = _limits().output_chars
    if length > most:
        raise BudgetExceeded(f"a text or list is longer than {most} items")


def _check_size(operator: str, left: Any, right: Any) -> None:
    most = _limits().repeat_chars
    if operator == "+":
        if isinstance(left, str | list) and isinstance(right, str | list):
            _check_length(len(left) + len(right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if not isinstance(sequence, str | list | tuple) or not isinstance(times, int):
                continue
            if len(sequence) * times > most:
                raise BudgetExceeded(f"a product is longer than {most} items")
    # "%1000000000d" makes a gigabyte; no chat template formats with widths of four digits.
    elif isinstance(left, str) and any(len(digits) > 3 for digits in _digit_runs(left)):
        raise BudgetExceeded("a format string asks for too wide a field")


def _digit_runs(text: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what to train on; here, it is a plain block."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > 256:
        raise jinja2.TemplateError("the date layout is longer than 256 characters")
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escaping, characters as they are."""
    if isinstance(indent, int) and indent > 64:
        raise jinja2.TemplateError("the JSON indent is larger than 64")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
