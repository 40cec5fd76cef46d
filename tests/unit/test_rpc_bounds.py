"""What clients and templates may ask for at most: messages, connections, lengths of made texts."""

from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from contextlib import ExitStack

import pytest

from protos.slipstream.v1 import inference_pb2 as pb
from service import http
from service.http import Answers, HttpPort
from service.rpc.errors import InvalidRequest
from service.rpc.prompts import MAX_MESSAGES, read_conversation
from service.rpc.violations import Violations
from service.text import ChatTemplateError, ChatTemplates

DEADLINE_S = 20.0
HUGE = {
    "format width": '{{ "{:>3000000000}".format("a") }}',
    "format width from arguments": '{{ "{:>{}}".format("a", "3000000000") }}',
    "format of many fields": '{% set a = "a" * 1000000 %}{{ ("{0}" * 100).format(a) }}',
    "tabs": '{{ ("\\t" * 100000).expandtabs(100000) }}',
    "tabs by name": '{{ ("\\t" * 100000).expandtabs(tabsize=100000) }}',
    "chained replace": '{% set a = "a" * 10000 %}{{ a.replace("a", a).replace("a", a) }}',
    "replace filter": '{% set a = "a" * 10000 %}{{ a | replace("a", a) }}',
    "center": '{{ "a" | center(3000000000) }}',
    "center by name": '{{ "a" | center(width=3000000000) }}',
    "slice": "{{ [1] | slice(3000000000) | list | length }}",
    "batch": '{{ [1] | batch(3000000000, "x") | list | length }}',
    "indent": '{{ ("\\n" * 100000) | indent(100000) }}',
    "format filter": '{{ "%3000000000d" | format(1) }}',
    "format filter with a star": '{{ "%*d" | format(3000000000, 1) }}',
    "map": '{{ ["a"] | map("center", 3000000000) | list | length }}',
    "join": '{% set a = "a" * 10000 %}{{ (["b"] * 10000) | join(a) }}',
    "kept texts": "{% set a = 'a' * 1000000 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(1000) %}{% set n.l = n.l + [a ~ i] %}{% endfor %}",
}


@pytest.mark.parametrize("name", HUGE)
def test_a_template_makes_nothing_huge(name: str) -> None:
    templates = ChatTemplates(HUGE[name])
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            templates.render([{"role": "user", "content": "hi"}])
        assert tracemalloc.get_traced_memory()[1] < 400 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{{ "{:>5}|{}".format("a", 1700000000) }}', "    a|1700000000"),
        ('{{ "a-b" | replace("-", "+") | center(5) }}', " a+b "),
        ('{{ ["a", "b"] | join(", ") }}', "a, b"),
        ('{{ ", ".join(["a", "b"]) }}', "a, b"),
        ('{{ "%s of %d" | format("a", 2) }}', "a of 2"),
        ('{{ "a\\nb" | indent(2) }}', "a\n  b"),
        ('{{ [1, 2, 3] | map("string") | list | length }}', "3"),
        ('{{ "x" | default("y") | upper }}', "X"),
    ],
)
def test_ordinary_formatting_is_as_it_was(template: str, text: str) -> None:
    assert ChatTemplates(template).render([{"role": "user", "content": "hi"}]) == text


def test_messages_are_bounded() -> None:
    chat = pb.Chat(messages=[pb.Message(role="user", content="a")] * MAX_MESSAGES)
    violations = Violations()
    assert len(read_conversation(chat, violations).messages) == MAX_MESSAGES
    violations.raise_if_any()
    chat.messages.add(role="user", content="a")
    read_conversation(chat, violations)
    with pytest.raises(InvalidRequest, match=rf"chat\.messages.*{MAX_MESSAGES}"):
        violations.raise_if_any()


async def _metrics() -> str:
    return ""


async def _is_ready() -> bool:
    return True


def _answer(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def test_connections_to_the_http_port_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = HttpPort("127.0.0.1", 0, Answers(_metrics, _is_ready), loop)
    try:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port.port), DEADLINE_S))
                for _ in range(4)
            ]
            assert b" 503 " in _answer(clients[3])  # accepted in order: the first three hold the threads
            clients[0].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert _answer(clients[0]).endswith(b"alive\n")
    finally:
        port.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
