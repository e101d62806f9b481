"""Clients of every kind at once: patient, slow, vanishing, wrong; for a test and a script."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = ("def add(a, b):", "import os\n", "class Tree:\n", "# Sorting\n", "x = [1, 2")
HEADERS = {"Content-Type": "application/json"}
BAD = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": 3}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "top_p": 9}',
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that came to its end, and what was asked for."""

    body: dict[str, Any]
    text: str
    finish: str


@dataclass(slots=True)
class Outcome:
    """What became of all requests."""

    finished: list[Finished] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)


async def soak(url: str, requests: int, at_once: int, seed: int) -> Outcome:
    """Sends so many requests of random kinds; every answer that comes is one of the expected."""
    chance, outcome = random.Random(seed), Outcome()
    plans = [(chance.choices(list(_KINDS), _WEIGHTS)[0], _body(chance)) for _ in range(requests)]
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(kind: str, body: dict[str, Any]) -> None:
            async with gate:
                outcome.kinds[kind] += 1
                await _KINDS[kind](client, body, outcome, chance)

        await asyncio.gather(*(one(kind, body) for kind, body in plans))
    return outcome


def _body(chance: random.Random) -> dict[str, Any]:
    return {
        "prompt": chance.choice(PROMPTS),
        "max_tokens": chance.randint(1, 16),
        "temperature": chance.choice([0.0, 0.7, 1.2]),
        "seed": chance.randint(0, 2**40),
        **({"stop": [chance.choice(["\n", "e", ")"])]} if chance.random() < 0.3 else {}),
    }


async def _whole(client: httpx.AsyncClient, body: Any, outcome: Outcome, _: object) -> None:
    response = await client.post("/v1/completions", json=body)
    outcome.statuses[response.status_code] += 1
    if response.status_code == 200:
        choice = response.json()["choices"][0]
        outcome.finished.append(Finished(body, choice["text"], choice["finish_reason"]))


async def _streamed(client: httpx.AsyncClient, body: Any, outcome: Outcome, _: object) -> None:
    await _stream(client, body, outcome, 0.0)


async def _slow(client: httpx.AsyncClient, body: Any, outcome: Outcome, _: object) -> None:
    await _stream(client, body, outcome, 0.05)


async def _stream(client: httpx.AsyncClient, body: Any, outcome: Outcome, pause_s: float) -> None:
    asked = client.stream("POST", "/v1/completions", json={**body, "stream": True})
    async with asked as response:
        outcome.statuses[response.status_code] += 1
        text, finish = "", ""
        async for line in response.aiter_lines():
            await asyncio.sleep(pause_s)
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "choices" in chunk:  # or it is an error
                    text += chunk["choices"][0]["text"]
                    finish = chunk["choices"][0]["finish_reason"] or finish
    if response.status_code == 200:
        assert finish, "a stream that was not cut has an end"
        outcome.finished.append(Finished(body, text, finish))


async def _vanishes(
    client: httpx.AsyncClient, body: Any, outcome: Outcome, chance: random.Random
) -> None:
    """Leaves after a while, or in the middle of the stream."""
    asked = {**body, "max_tokens": 500, "stream": chance.random() < 0.5}
    try:
        async with asyncio.timeout(chance.uniform(0.0, 1.0)):
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                outcome.statuses[response.status_code] += 1
                lines = response.aiter_lines()
                for _ in range(chance.randint(0, 5)):
                    await anext(lines, None)
    except (TimeoutError, httpx.HTTPError):
        pass


async def _wrong(
    client: httpx.AsyncClient, body: Any, outcome: Outcome, chance: random.Random
) -> None:
    response = await client.post("/v1/completions", content=chance.choice(BAD), headers=HEADERS)
    outcome.statuses[response.status_code] += 1
    assert response.status_code == 400


async def _breaks_off(
    client: httpx.AsyncClient, body: Any, outcome: Outcome, chance: random.Random
) -> None:
    """Promises a body that never comes whole."""
    url = client.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"prompt":'
    )
    await writer.drain()
    await asyncio.sleep(chance.uniform(0.0, 0.2))
    writer.close()
    await writer.wait_closed()


_KINDS = {
    "whole": _whole, "streamed": _streamed, "slow": _slow, "vanishes": _vanishes,
    "wrong": _wrong, "breaks off": _breaks_off,
}  # fmt: skip
_WEIGHTS = (3, 3, 1, 3, 1, 1)
