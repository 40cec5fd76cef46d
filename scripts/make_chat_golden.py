"""Remakes tests/unit/golden/chat.json: conversations rendered by `transformers`. Needs it installed.

    python scripts/make_chat_golden.py

The templates are written to exercise what chat templates of published models use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "tests" / "unit" / "golden" / "chat.json"

TEMPLATES = {
    "blocks are trimmed": """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
[no system]
    {%- endif %}
  {{ message['role'] | upper }}: {{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}
ASSISTANT:
{% endif %}
""",
    "tools as JSON": """{% if tools %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}{{ bos_token }}{{ message.role }}{% if message.tool_calls %}
{%- for call in message.tool_calls %}{{call.function.name}}{{ call.function.arguments | tojson}}{% endfor %}
{%- endif %}{{ message.content }}{{ eos_token }}{% endfor %}""",
    "loop controls": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif -%}
{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index0 }}={{ m.content }};{% endfor %}""",
    "namespace and reversal": """{% set ns = namespace(last=-1, n=0) %}{% for message in messages[::-1] %}
{% if message.role == 'user' and ns.last < 0 %}{% set ns.last = messages|length - 1 - loop.index0 %}{%endif%}
{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} messages, last question at {{ ns.last }}.
{% for m in messages %}{{ m.content.split(' ')[-1] }}{{ ',' if not loop.last }}{% endfor %}""",
    "generation block": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}
<{{ message.content }}>
{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "macros and kwargs": """{% macro turn(role, text) %}<|{{ role }}|>{{ text }}{% endmacro %}
{%- if enable_thinking is defined and not enable_thinking %}no thinking {% endif %}
{%- for m in messages %}{{ turn(m['role'], m['content']) }}{% endfor %}
{{ limit if limit is defined else 'none' }}""",
    "html is left alone": """{{ messages[0].content }}{{ messages[0] | tojson }}{{ messages[0].missing }}""",
    "missing things": """{% if messages[0].name is defined %}{{ messages[0].name }}{% else %}anonymous
{%- endif %}{{ messages[0].get('name', '?') }}{{ documents is none }}{{ tools is none }}""",
}

CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": 'Hello <b>world</b> & "friends"'}]},
    {
        "messages": [
            {"role": "system", "content": "  Be brief.  "},
            {"role": "user", "content": "日本語? é 👍"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "More please"},
        ],
        "add_generation_prompt": True,
    },
    {
        "messages": [
            {"role": "user", "content": "Weather in Bern?", "name": "ann"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}},
                    }
                ],
            },
            {"role": "tool", "content": '{"sky": "grey"}'},
        ],
        "add_generation_prompt": True,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Tells the <weather>.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "city": {"type": "string", "description": "Where"},
                            "days": {"type": "integer", "enum": [1, 2], "description": "How long"},
                        },
                        "required": ["city"],
                    },
                },
            }
        ],
        "kwargs": {"enable_thinking": False, "limit": 5},
    },
]

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    cases = []
    for name, template in TEMPLATES.items():
        for conversation in CONVERSATIONS:
            (rendered,), _ = render_jinja_template(
                [conversation["messages"]],
                tools=conversation.get("tools"),
                chat_template=template,
                add_generation_prompt=conversation.get("add_generation_prompt", False),
                **SPECIAL_TOKENS,
                **conversation.get("kwargs", {}),
            )
            cases.append({"name": name, "template": template, **conversation, "rendered": rendered})
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    golden = {"special_tokens": SPECIAL_TOKENS, "cases": cases}
    TARGET.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
