"""Chat templates: as `transformers` renders them (golden/chat.json), safely, within limits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from service.text import ChatTemplateError, ChatTemplates
from service.text.json_values import plain
from service.text.template_environment import RenderLimits

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat.json").read_text())
USER = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    limits = options.pop("limits", None)
    return ChatTemplates(template, limits=limits).render(messages, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_renders_as_transformers(case: dict[str, Any]) -> None:
    templates = ChatTemplates(case["template"], GOLDEN["special_tokens"])
    rendered = templates.render(
        case["messages"],
        tools=case.get("tools"),
        template_kwargs=case.get("kwargs"),
        add_generation_prompt=case.get("add_generation_prompt", False),
    )
    assert rendered == case["rendered"]


def shuffled(value: Any, generator: random.Random) -> Any:
    """The same JSON with the keys of every object in another order, and integers as doubles."""
    if isinstance(value, dict):
        keys = list(value)
        generator.shuffle(keys)
        return {key: shuffled(value[key], generator) for key in keys}
    if isinstance(value, list):
        return [shuffled(item, generator) for item in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("seed", range(5))
def test_data_that_came_through_protobuf_renders_the_same(seed: int) -> None:
    generator = random.Random(seed)
    for case in GOLDEN["cases"]:
        templates = ChatTemplates(case["template"], GOLDEN["special_tokens"])
        rendered = templates.render(
            shuffled(case["messages"], generator),
            tools=shuffled(case.get("tools"), generator),
            template_kwargs=shuffled(case.get("kwargs"), generator),
            add_generation_prompt=case.get("add_generation_prompt", False),
        )
        assert rendered == case["rendered"]


def test_a_generation_prompt_is_asked_for_by_default() -> None:
    assert render("{{ add_generation_prompt }}") == "True"


def test_tools_pick_the_template_for_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert templates.render(USER) == "plain"
    assert templates.render(USER, tools=[{"type": "function"}]) == "tools"
    with pytest.raises(ChatTemplateError, match="'default'; it has tool_use, rag"):
        ChatTemplates({"tool_use": "tools", "rag": "rag"}).render(USER)


def test_null_fields_are_fields_left_out() -> None:
    assert render("{{ messages[0].tool_calls is defined }}", [{"role": "a", "tool_calls": None}]) == "False"


def test_dates_come_from_the_clock() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_arguments_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"{name} cannot be set"):
        render("{{ messages }}", template_kwargs={name: []})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on this conversation: TypeError"),
        ("{{ messages[7].content.x }}", "refuses this conversation: .*no element 7"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ missing() }}", "'missing' is undefined"),
        ("{% include 'x' %}", "fails on this conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_gives_one_kind_of_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for a in b %}", "{% unknown %}"])
def test_a_template_that_does_not_compile_is_refused_when_made(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplates(template)


def test_no_template_at_all_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplates({})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ('{0.__class__}').format(messages) }}",
        "{{ self.__init__ }}",
    ],
)
def test_the_interpreter_is_out_of_reach(template: str) -> None:
    try:
        rendered = render(template)
    except ChatTemplateError:
        return
    assert "class" not in rendered
    assert "function" not in rendered
    assert "method" not in rendered


DOUBLING = (
    "{{% set ns = namespace(x='abcdefgh') %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"
)
LIMITS = RenderLimits(operations=20_000, seconds=30.0, output_chars=100_000, repeat_chars=10_000)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}", "operations"),
        ("{% for a in range(999) %}{% for b in range(999) %}{% set x = a.b %}{% endfor %}{% endfor %}", "op"),
        ("{% for a in range(9999) %}abcdefghijklmnopqrstuvwxyz{% endfor %}", "longer than 100000 characters"),
        ("{{ 'x' * 10**9 }}", "powers"),
        ("{{ 'x' * 1000000000 }}", "a product is longer"),
        ("{{ 1000000000 * [messages] }}", "a product is longer"),
        ("{{ '%1000000000d' % 1 }}", "too wide"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{{ messages | tojson(indent=1000000) }}", "indent"),
        ("{{ strftime_now('%A' * 1000) }}", "layout"),
        ("{% set r = range(999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "operations"),
        (DOUBLING.format("ns.x ~ ns.x"), "longer than 100000"),
        (DOUBLING.format("ns.x + ns.x"), "longer than 100000"),
        ("{{ 'x'.ljust(3000000000) }}", "longer than 100000"),
        ("{{ lipsum(n=99999999) }}", "undefined"),
    ],
)
def test_a_template_cannot_exhaust_the_server(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template, limits=LIMITS)


def test_time_is_limited() -> None:
    """Checked at every piece of output, so no clock is needed to see it: the limit is over at once."""
    with pytest.raises(ChatTemplateError, match="longer than -1 s"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", limits=RenderLimits(seconds=-1.0))


def test_a_limit_met_by_one_conversation_leaves_the_next_alone() -> None:
    templates = ChatTemplates("{% for m in messages %}{{ m.content }}{% endfor %}", limits=LIMITS)
    with pytest.raises(ChatTemplateError):
        templates.render(USER * 50_000)
    assert templates.render(USER) == "Hi"


def test_long_conversations_fit_the_ordinary_limits() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}U{% elif m.role == 'x' %}X{% else %}A{% endif %}"
        "{{ m['content'] | trim }}{{ loop.index % 2 }}{% endfor %}"
    )
    assert len(render(template, USER * 10_000)) == 40_000


class _Tempting(str):
    """Data with a method of its own."""

    def steal(self) -> str:
        return "stolen"


def test_data_has_no_methods_of_its_own() -> None:
    value = plain({"a": [_Tempting("x"), 1.0, 1.5, True, None, float(2**60)]})
    assert value == {"a": ["x", 1, 1.5, True, None, float(2**60)]}
    assert [type(item) for item in value["a"]] == [str, int, float, bool, type(None), float]
    with pytest.raises(ChatTemplateError):
        render("{{ messages[0].content.steal() }}", [{"role": "user", "content": _Tempting("x")}])


def test_keys_come_in_one_order() -> None:
    tool = {"function": {"parameters": {}, "z": 1, "alpha": 2, "name": "f", "description": "d"}, "type": "x"}
    assert json.dumps(plain(tool)) == (
        '{"type": "x", "function": {"name": "f", "description": "d", "parameters": {}, "alpha": 2, "z": 1}}'
    )


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ChatTemplateError, match="no JSON"):
        render("x", [{"role": "user", "content": value}])


def test_nesting_is_limited() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nested deeper"):
        render("x", template_kwargs={"deep": deep})


def test_values_that_are_not_finite_are_data() -> None:
    assert render("{{ a }}{{ b }}", template_kwargs={"a": float("inf"), "b": float("nan")}) == "infnan"
