"""Hostile clients: bodies made from the server's own schema, half requests and large ones."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from specexec_cli.serve.bodies import ChatBody, CompletionBody

KINDS = {
    "chat/completions": ChatBody.model_json_schema(),
    "completions": CompletionBody.model_json_schema(),
}
JSON = {"Content-Type": "application/json"}
EXPECTED = {200, 400, 404, 413, 429, 499}
NUMBERS = (0, 1, -1, 0.5, 2, 1e300, -0.0, 2**31, 2**70)
WORDS = ("", "x", "def f(", "é漢😀", "\x00", "<|end|>", "</think>", "a" * 2000, "../demo", "demo")
SMALL = 16  # tokens of a text, so that many are made


def body(kind: str, chance: random.Random) -> bytes:
    """A body as the schema has it, or with something in it that the schema does not allow."""
    schema = KINDS[kind]
    made = _made(schema, schema.get("$defs", {}), chance, 0)
    if chance.random() < 0.5:
        made = {name: made[name] for name in made if name in schema["required"]} | dict(
            chance.sample(sorted(made.items()), min(len(made), 3))
        )
    if chance.random() < 0.8:
        made["max_tokens"] = chance.randint(1, SMALL)
    if chance.random() < 0.3:
        _spoil(made, chance)
    for name in ("max_tokens", "max_completion_tokens"):  # long texts are no hangs, but look so
        if isinstance(made.get(name), int) and SMALL < made[name] <= 1 << 30:
            made[name] = chance.randint(1, SMALL)
    raw = json.dumps(made).encode()
    if chance.random() < 0.05:
        at = chance.randrange(len(raw) + 1)
        raw = raw[:at] + bytes(chance.randrange(256) for _ in range(3)) + raw[at + 1 :]
    return raw


def _made(schema: dict[str, Any], defs: dict[str, Any], chance: random.Random, depth: int) -> Any:
    """A value that a JSON schema describes."""
    if "$ref" in schema:
        return _made(defs[schema["$ref"].rpartition("/")[2]], defs, chance, depth)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _made(chance.choice(schema[several]), defs, chance, depth)
    if "const" in schema or "enum" in schema:
        return chance.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            named, required = schema.get("properties", {}), schema.get("required", ())
            found = {
                name: _made(each, defs, chance, depth + 1)
                for name, each in named.items()
                if name in required or chance.random() < 0.3
            }
            if schema.get("additionalProperties") is True and schema.get("maxProperties") != 0:
                found |= {chance.choice(WORDS): _anything(chance, depth) for _ in range(2)}
            return found
        case "array":
            most = min(schema.get("maxItems", 4), 4)
            count = chance.randint(min(schema.get("minItems", 0), most), most)
            return [_made(schema.get("items", {}), defs, chance, depth + 1) for _ in range(count)]
        case "string":
            return chance.choice(WORDS)
        case "integer":
            low, high = schema.get("minimum", -3), schema.get("maximum", 5000)
            return chance.choice([low, high, chance.randint(low, min(high, low + 20))])
        case "number":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2)
            return chance.choice([low, high, chance.uniform(low, high)])
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case _:
            return _anything(chance, depth)


def _anything(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(4 if depth < 4 else 2)
    if kind == 0:
        return chance.choice(WORDS)
    if kind == 1:
        return chance.choice([*NUMBERS, None, True])
    items = [_anything(chance, depth + 1) for _ in range(chance.randrange(3))]
    return items if kind == 2 else {chance.choice(WORDS): item for item in items}


def _spoil(made: dict[str, Any], chance: random.Random) -> None:
    """One value somewhere becomes another."""
    while made:
        name = chance.choice(sorted(made))
        inner = made[name]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = chance.choice(inner)
        if not isinstance(inner, dict) or chance.random() < 0.5:
            made[name] = _anything(chance, 0)
            return
        made = inner


async def fuzz(url: str, requests: int, seed: int, at_once: int = 16) -> tuple[Counter[str], float]:
    """Sends bodies made from the schema, and leaves some before their answer.

    Returns:
        how often each status came, "left" among them, each of which is asserted to be expected;
        and the seconds of the slowest answer.
    """
    slowest = 0.0
    chance, told, gate = random.Random(seed), Counter[str](), asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)

    async def one(kind: str, raw: bytes, leaves_s: float | None) -> None:
        nonlocal slowest
        async with gate:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(leaves_s):
                    found = await client.post(f"/v1/{kind}", content=raw, headers=JSON)
            except TimeoutError:
                told["left"] += 1
                return
            slowest = max(slowest, time.perf_counter() - began)
            told[str(found.status_code)] += 1
            assert found.status_code in EXPECTED, (found.status_code, found.text, raw)
            assert "Traceback" not in found.text

    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        plans = [
            (kind, body(kind, chance), chance.uniform(0, 0.3) if chance.random() < 0.2 else None)
            for kind in chance.choices(list(KINDS), k=requests)
        ]
        await asyncio.gather(*(one(*plan) for plan in plans))
    return told, slowest


@contextmanager
def half_open(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that send half of a request's headers."""
    with ExitStack() as held:
        yield [held.enter_context(_half(port)) for _ in range(count)]


def _half(port: int) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=30)
    found.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
    return found


def large_bodies(size: int = (8 << 20) - 100) -> dict[str, tuple[str, bytes]]:
    """Bodies of that size, each of which some part of a server may be slow at: path and bytes."""

    def filled(path: str, begins: str, unit: str, ends: str) -> tuple[str, bytes]:
        room = size - len(begins.encode()) - len(ends.encode())
        return path, (begins + unit * (room // len(unit.encode())) + ends).encode()

    text, chat = "completions", "chat/completions"
    message, tail = '{"role":"user","content":"x"},', '{"role":"user","content":"x"}]}'
    keys = ",".join(f'"k{number}":0' for number in range(size // 12))
    return {
        "brackets": filled(text, "", "[", ""),
        "lists": filled(text, '{"prompt":[', "[],", "1]}"),
        "objects": filled(text, '{"prompt":[', "{},", "1]}"),
        "whole numbers": filled(text, '{"prompt":[', "1,", "1]}"),
        "tokens": filled(text, '{"prompt":[', "12345,", "1]}"),
        "fractions": filled(text, '{"prompt":[', "1e9,", "1]}"),
        "long numbers": filled(text, '{"prompt":[', "9" * 4000 + ",", "1]}"),
        "one number": filled(text, '{"prompt":', "9", "}"),
        "texts": filled(text, '{"prompt":[', '"a",', '""]}'),
        "quotes": filled(text, "", '"', ""),
        "blanks": filled(text, "", " ", ""),
        "keys": (text, f'{{"prompt":"x",{keys}}}'.encode()[:size]),
        "letters": filled(text, '{"prompt":"', "a", '"}'),
        "words": filled(text, '{"prompt":"', "hello there ", '"}'),
        "escapes": filled(text, '{"prompt":"', "\\n", '"}'),
        "halves": filled(text, '{"prompt":"', "\\ud83d\\ude00", '"}'),
        "characters": filled(text, '{"prompt":"', "漢字", '"}'),
        "messages": filled(chat, '{"messages":[', message, tail),
        "fewer messages": (chat, ('{"messages":[' + message * 9000 + tail).encode()),
        "parts": filled(chat, '{"messages":[{"role":"user","content":[',
                        '{"type":"text","text":"x"},', '{"type":"text","text":"x"}]}]}'),
        "numbers as parts": filled(chat, '{"messages":[{"role":"user","content":[', "1,", "1]}]}"),
        "special tokens": filled(chat, '{"messages":[{"role":"user","content":"', "<|end|>",
                                 '"}]}'),
        "name": filled(chat, '{"model":"', "m", '","messages":[{"role":"user","content":"x"}]}'),
        "schema": filled(chat, '{"messages":[{"role":"user","content":"x"}],"response_format":'
                         '{"type":"json_schema","json_schema":{"schema":{"enum":["', "s", '"]}}}}'),
        "tools": filled(chat, '{"messages":[{"role":"user","content":"x"}],"tools":[', "1,", "1]}"),
    }  # fmt: skip


class Waits:
    """Asks for /health and for a short text all the time; how long each took. A context."""

    def __init__(self, url: str) -> None:
        self.longest = {"health": 0.0, "text": 0.0}
        self._url = url
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=("health", lambda ask: ask.get("/health"))),
            threading.Thread(target=self._ask, args=("text", lambda ask: ask.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 1}))),
        ]  # fmt: skip

    def __enter__(self) -> Waits:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, what: str, ask: Any) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ended.is_set():
                began = time.perf_counter()
                assert ask(client).status_code == 200
                self.longest[what] = max(self.longest[what], time.perf_counter() - began)
                time.sleep(0.01)
