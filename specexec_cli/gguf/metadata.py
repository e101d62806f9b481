"""Reads the metadata of a GGUF file, and checks each value before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, shown

_MOST = 1 << 31  # no size of a model is larger


class Metadata:
    """The metadata of a file's architecture; each value is checked when it is asked for."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")

    def refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {reason}: get another file of the model")

    def value(self, key: str) -> Any:
        own = self._file.metadata.get(f"{self.architecture}.{key}")
        # xIELU's numbers have no architecture in front
        return self._file.metadata.get(key) if own is None and key.startswith("xielu.") else own

    def whole(self, key: str, default: int | None = None, *, uneven: bool = False) -> int:
        """A whole number, 0 or more; a list of equal numbers counts as one number.

        Args:
            uneven: of a list of other numbers, the first counts.
        """
        value = self.value(key)
        if isinstance(value, list) and value and (uneven or all(n == value[0] for n in value)):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 <= value < _MOST:
            what = "has no" if value is None else f"says {shown(value)} as"
            raise self.refusal(f"its metadata {what} '{self.architecture}.{key}'")
        return value

    def each(self, key: str, layers: int) -> list[int]:
        """A whole number for each layer; a file may say one for all."""
        value = self.value(key)
        if not isinstance(value, list):
            return [self.whole(key)] * layers
        if len(value) < layers or not all(type(n) is int and 0 <= n < _MOST for n in value):
            raise self.refusal(f"its metadata says {shown(value)} as '{self.architecture}.{key}'")
        return value[:layers]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            what = "has no" if value is None else f"says {shown(value)} as"
            raise self.refusal(f"its metadata {what} '{self.architecture}.{key}'")
        return float(value)

    def each_number(self, key: str, layers: int, default: float | None = None) -> list[float]:
        """A number for each layer, perhaps an infinite one; a file may say a finite one for all."""
        value = self.value(key)
        if not isinstance(value, list):
            return [self.number(key, default)] * layers
        if len(value) < layers or not all(type(n) in (int, float) and n == n for n in value):
            raise self.refusal(f"its metadata says {shown(value)} as '{self.architecture}.{key}'")
        return [float(number) for number in value[:layers]]

    def flag(self, key: str) -> bool:
        """Whether something is so."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.refusal(f"its metadata says {shown(value)} as '{self.architecture}.{key}'")
        return value

    def counted(self, key: str, what: str, found: int | None, less: int = 0) -> int:
        """A count, checked against the tensors: memory will be allocated for that count.

        Args:
            found: how many the tensors are of; None if they do not agree.
            less: subtracted from what the metadata says.
        """
        said = self.whole(key) - less
        if said != found:
            has = "lacks some of its" if found is None else f"has tensors of {found}"
            raise self.refusal(f"its metadata says {said} {what}, the file {has} {what}")
        return said

    def ids_of(self, tokens: Iterable[str]) -> dict[str, int]:
        """The numbers of those of the tokens that the vocabulary has."""
        vocabulary, wanted = self._file.metadata.get("tokenizer.ggml.tokens"), frozenset(tokens)
        if not isinstance(vocabulary, list):
            return {}
        return {word: n for n, word in enumerate(vocabulary) if word in wanted}

    def token(self, key: str) -> int | None:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}")
        return value if type(value) is int else None
