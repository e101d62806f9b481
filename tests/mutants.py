"""Damaged files: a right one with one to three damages, drawn from a seed."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
from typing import Any

# numbers that headers lie with: signs, borders of 32 and 64 bits, and sums that wrap
HOSTILE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)
# texts of JSON, of which some are none or mean nothing to Python
VALUES = (
    "null", "true", "0", "-1", "1", "5", "1.5", "1e308", "-1e-308", "1e999", "NaN", "-Infinity",
    *map(str, HOSTILE), "1" * 30, "9" * 41, "9" * 400, "9" * 5000, '""', '"x"', '"0"', '"[["',
    '"' + "x" * 5000 + '"', '"../../../x"', '"/x"', r'"\ud800"', r'"\u0000"', r'"a\n\u001b[31mb"',
    '"é"', "[]", "{}", "[null]", "[1]", '["x"]', "[[[1]]]", '{"a": 1}', '{"a": {"a": []}}',
    "[" + "1, " * 3000 + "1]", "[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 100_000,
    '"(a+)+$"', '{"(?:.*)*b!": {}}', "100000", "1000000", "-7", "3", "16", "4096",
)  # fmt: skip
_PLACE = "\x01place\x01"


def mutated(raw: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """The file with one to three damages within its header, or cut off."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(header_bytes)
        kind = rng.choice(("flip", "number", "wide", "cut", "double", "swap", "drop"))
        if kind == "flip":
            data[place] ^= 1 << rng.randrange(8)
        elif kind == "number":
            data[place : place + 4] = struct.pack("<I", rng.choice(HOSTILE) % 2**32)
        elif kind == "wide":
            data[place : place + 8] = struct.pack("<Q", rng.choice(HOSTILE))
        elif kind == "cut":
            del data[place + rng.randrange(64) :]
        elif kind == "double":
            data[place:place] = data[place : place + rng.randrange(1, 64)]
        elif kind == "swap":
            other = rng.randrange(header_bytes)
            piece = data[other : other + 8]
            data[place : place + len(piece)] = piece
        else:
            del data[place : place + rng.randrange(1, 16)]
        if len(data) <= header_bytes:
            return bytes(data)
    return bytes(data)


def mutated_json(raw: bytes, rng: random.Random) -> bytes:
    """One JSON value with other values, names and types in it, or with damaged bytes."""
    if rng.random() < 0.3:
        return mutated(raw, len(raw), rng)
    value, hostile = json.loads(raw), []
    for _ in range(rng.randint(1, 3)):
        holders = [(None, None), *_places(value)]
        holder, key = rng.choice(holders)
        chosen = f"{_PLACE}{len(hostile)}{_PLACE}"
        hostile.append(rng.choice(VALUES))
        if holder is None:
            value = chosen if rng.random() < 0.3 else value
        elif (kind := rng.random()) < 0.75:
            holder[key] = chosen
        elif kind < 0.85:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), chosen)
        else:
            holder["x" * rng.choice((0, 1, 300, 5000))] = holder[key]
    text = json.dumps(value)
    for number, one in enumerate(hostile):
        text = text.replace(json.dumps(f"{_PLACE}{number}{_PLACE}"), one)
    return text.encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each list or object in a value, with each index or name in it."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [each for key in keys for each in _places(value[key])]


def mutated_lines(raw: bytes, rng: random.Random) -> bytes:
    """A file of a JSON value to a line: a line damaged, twice there, moved, or gone."""
    lines = raw.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.8:
        lines[at] = mutated_json(lines[at], rng) + b"\n" * (rng.random() < 0.9)
    elif kind < 0.9:
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    else:
        del lines[at]
    return b"".join(lines)


def mutated_toml(raw: bytes, rng: random.Random) -> bytes:
    """A TOML file with other values and names in it, or with damaged bytes."""
    if rng.random() < 0.3:
        return mutated(raw, len(raw), rng)
    text = raw.decode()
    for _ in range(rng.randint(1, 3)):
        names = r"(?<=\[)[\w.-]+|^\w+" if rng.random() < 0.2 else r"(?<== )[^\n]+"
        found = rng.choice(list(re.finditer(names, text, re.MULTILINE)))
        new = rng.choice((*VALUES, "a" + ".a" * rng.choice((3, 200, 20_000)), "0x" + "f" * 300))
        text = text[: found.start()] + new.replace(":", "=") + text[found.end() :]
    return text.encode()


def mutated_safetensors(raw: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a damaged header, whose length is right more often than not."""
    (length,) = struct.unpack("<Q", raw[:8])
    if rng.random() < 0.3:
        return mutated(raw, 8 + length, rng)
    header = mutated_json(raw[8 : 8 + length], rng)
    told = len(header) if rng.random() < 0.9 else rng.choice(HOSTILE)
    return struct.pack("<Q", told) + header + raw[8 + length :]


def mutated_torch_file(raw: bytes, rng: random.Random) -> bytes:
    """A file of torch.save that is damaged anywhere, or in its pickle under a right checksum."""
    if rng.random() < 0.3:
        return mutated(raw, len(raw), rng)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = mutated(content, len(content), rng)
            new.writestr(name, content)
    return changed.getvalue()
