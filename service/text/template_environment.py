"""The Jinja environment chat templates run in: what Hugging Face templates expect, in a sandbox, bounded.

A template comes with the model, the data it reads from clients. Neither may reach the interpreter (Jinja's
immutable sandbox), hang it (a budget of operations and seconds) or fill its memory (bounded products and
output).
"""

from __future__ import annotations

import functools
import json
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator
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
    """Longest string or list that `*` may make."""
    made_chars: int = 256 * 2**20
    """All texts and lists that methods, filters, `+` and `~` make, together: they may all be kept."""


class BudgetExceeded(jinja2.TemplateError):
    """A rendering went over its limits."""


class RenderBudget:
    """What is left of one rendering's limits."""

    _CHECK_TIME_EVERY = 1024
    _LONG = 65_536  # characters, from which on one result costs more than reading the clock

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._operations_left = limits.operations
        self._chars_left = limits.made_chars
        self._deadline = time.monotonic() + limits.seconds

    def spend(self) -> None:
        """One operation. Raises BudgetExceeded."""
        self._operations_left -= 1
        if self._operations_left < 0:
            raise BudgetExceeded(f"rendering takes more than {self.limits.operations} operations")
        if self._operations_left % self._CHECK_TIME_EVERY == 0:
            self.check_time()

    def afford(self, length: int) -> None:
        """A text or list of at most `length` is about to be made. Raises BudgetExceeded."""
        self._chars_left -= length
        if self._chars_left < 0:
            raise BudgetExceeded(f"rendering makes more than {self.limits.made_chars} characters")
        if length > self._LONG:
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
        self.filters = {name: _bounded_filter(name, made) for name, made in self.filters.items()}
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
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_result(method.__name__, owner, args, kwargs)
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
    budget = _budget.get()
    if budget is not None:
        budget.afford(length)


_FORMATTING = frozenset(["format", "format_map"])
_STARRED = re.compile(r"%[-+ #0]*\d*\.?\*")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing to make what is too long. Jinja's marks on `function` are kept."""
    n_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _spend()
        value, *further = args[n_passed:]
        if name == "format":
            _check_size("%", value, kwargs or tuple(further))
        else:
            _check_result(name, value, tuple(further), kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, str | list):
            _check_length(len(result))
        return result

    return checked


def _check_result(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a call of the string method or filter `name` on `value` whose result could be too long.

    Widths, counts and indents multiply with what they are repeated for: at most once for each character of
    the value.
    """
    arguments = (*args, *kwargs.values())
    if name == "tojson":
        return  # bounds its indent itself
    if name in _FORMATTING:
        _check_format(value, arguments)
        return
    size = len(value) if isinstance(value, str | list | tuple | dict) else 1
    if name == "replace" and isinstance(value, str) and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        _check_length(size + value.count(old) * len(new))
        return
    if name == "join":
        _check_join(value, args, kwargs)
        return
    widths = [argument for argument in arguments if isinstance(argument, int)]
    texts = [len(argument) for argument in arguments if isinstance(argument, str)]
    repeats = 1
    if isinstance(value, str):
        repeats = {"expandtabs": value.count("\t"), "indent": value.count("\n") + 1}.get(name, 1)
    for width in widths:
        _check_length(size + width * repeats)
    if name in ("indent", "wordwrap", "translate"):  # the argument is put in, again and again
        _check_length(size + size * max(texts, default=0))


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
    elif isinstance(left, str):
        _check_width(left)
        if _STARRED.search(left):
            raise BudgetExceeded("a format string takes a width from its arguments")
        values = (
            right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
        )
        _check_fields(left, left.count("%"), values)


def _check_format(layout: str, arguments: tuple[Any, ...]) -> None:
    """str.format and str.format_map."""
    n_fields = 0
    for _, field, spec, _ in string.Formatter().parse(layout):
        n_fields += field is not None
        _check_width(spec or "")
        if "{" in (spec or ""):
            raise BudgetExceeded("a format string takes a width from its arguments")
    _check_fields(layout, n_fields, arguments)


def _check_fields(layout: str, n_fields: int, values: Iterable[Any]) -> None:
    """Each field may show the longest of the values, or 999 characters of padding."""
    longest = max((len(value if isinstance(value, str) else str(value)) for value in values), default=0)
    _check_length(len(layout) + n_fields * (longest + 999))


def _check_width(spec: str) -> None:
    """ "%1000000000d" makes a gigabyte; no chat template formats with widths of four digits."""
    if any(len(digits) > 3 for digits in _digit_runs(spec)):
        raise BudgetExceeded("a format string asks for too wide a field")


def _check_join(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The method ", ".join(parts), and the filter parts | join(", ")."""
    if isinstance(value, str) and args and not isinstance(args[0], str):
        separator, parts = value, args[0]
    else:
        separator, parts = kwargs.get("d", args[0] if args else ""), value
    if isinstance(parts, str | list | tuple | dict):
        lengths = sum(len(part) if isinstance(part, str) else 1 for part in parts)
        _check_length(lengths + len(parts) * len(str(separator)))


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
