"""Routers for rigs of mixtures, with a given skew and a given locality of their choices.

A router's inputs on the source's text are recorded, and features are found in them that change
slowly from token to token. A router is a random linear map of the slowest features plus a constant
for each expert. The choice of features sets the locality, how many experts the next token uses
again; the constants set the skew, how unevenly experts are chosen.

Source: slow feature analysis, Wiskott and Sejnowski, Neural Computation 14, 2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

Floats = NDArray[np.float64]

TEXT_TOKENS = 3000
_PROMPT_TOKENS = 250  # tokens of each text that are recorded
# of the features, from the slowest on; from the fastest on if negative
_FEATURES = (4, 8, 16, 32, 64, 128, -128, -64, -32)
_STEPS = 10  # steps of the bisection


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a mixture's rows choose their experts."""

    skew: float  # share of the experts that get 80 % of the choices
    locality: float  # share of a token's experts that the next one uses again


def recorded(folder: Path, texts: list[str]) -> list[list[Floats]]:
    """Runs the source over texts, and records the inputs of each layer's MLP.

    Returns:
        (tokens, hidden) for each layer and text; then, as a further layer, the residual stream
        after the last layer.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    layers = model.model.layers
    seen: list[list[Floats]] = [[] for _ in range(len(layers) + 1)]

    def keep(index: int, rows: torch.Tensor) -> None:
        seen[index].append(rows[0].double().numpy())

    for index, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: keep(index, args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: keep(len(layers), args[0]))
    done = 0
    with torch.no_grad():
        for text in texts:
            tokens = tokenizer(text)["input_ids"][:_PROMPT_TOKENS]
            if len(tokens) > 8 and done < TEXT_TOKENS:
                model(torch.tensor([tokens]))
                done += len(tokens)
    # behind the last layer the rig's norms weigh every dimension alike
    seen[-1] = [rows / np.sqrt(np.square(rows).mean(1, keepdims=True)) for rows in seen[-1]]
    return seen


class Router:
    """Makes routers for the recorded inputs of one layer."""

    def __init__(self, texts: list[Floats], chosen: int) -> None:
        """Finds the slow features.

        Args:
            texts: the recorded inputs, (tokens, hidden) for each text.
            chosen: experts that a row chooses.
        """
        self._texts, self._chosen = texts, chosen
        rows = np.concatenate(texts)
        # a direction that is one for every row, as nearly as there is one
        self._constant = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
        self._mean = rows.mean(0)
        centred = rows - np.outer(rows @ self._constant, self._mean)
        values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
        used = values > 1e-6 * values[-1]
        white = vectors[:, used] / np.sqrt(values[used])
        steps = np.concatenate([np.diff(text @ white, axis=0) for text in texts])
        _, slow = np.linalg.eigh(steps.T @ steps)
        self._slow = white @ slow  # (hidden, features), the slowest first

    def weights(self, experts: int, wanted: Routing, rng: np.random.Generator) -> Floats:
        """The weights (experts, hidden) of the router nearest to the wanted routing."""
        constants = rng.permutation(-np.log(np.arange(1.0, experts + 1.0)))
        best, nearest = None, np.inf
        for count in _FEATURES:
            features = self._slow[:, :count] if count > 0 else self._slow[:, count:]
            mix = rng.standard_normal((experts, features.shape[1])) @ features.T
            # removes the mean, so that no expert is preferred on average
            mix -= np.outer(mix @ self._mean, self._constant)
            weights = self._skewed(mix, constants, wanted.skew)
            found = self.measured(weights)
            off = abs(found.locality - wanted.locality) + abs(found.skew - wanted.skew)
            if off < nearest:
                best, nearest = weights, off
        assert best is not None
        return best

    def _skewed(self, mix: Floats, constants: Floats, skew: float) -> Floats:
        low, high = 0.0, 64.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self.measured(mix + middle * np.outer(constants, self._constant)).skew > skew:
                low = middle
            else:
                high = middle
        return mix + low * np.outer(constants, self._constant)

    def measured(self, weights: Floats) -> Routing:
        """The skew and locality of a router on the recorded texts."""
        choices = [self._choose(text, weights) for text in self._texts]
        return routing_of(choices, len(weights))

    def spread(self, weights: Floats) -> float:
        """The standard deviation of a router's logits on the recorded texts."""
        return float(np.std(np.concatenate(self._texts) @ weights.T))

    def _choose(self, rows: Floats, weights: Floats) -> NDArray[np.int64]:
        return np.argpartition(-(rows @ weights.T), self._chosen - 1, axis=1)[:, : self._chosen]


class Routers:
    """The routers of a rig's layers."""

    def __init__(
        self, folder: Path, texts: list[str], experts: int, chosen: int, wanted: Routing, seed: int
    ) -> None:
        """Runs the source over the texts.

        Args:
            folder: of the source.
            experts: of each layer of the rig.
        """
        self._experts, self._wanted, self._seed = experts, wanted, seed
        self._layers = [Router(texts_seen, chosen) for texts_seen in recorded(folder, texts)]

    def weights(self, layer: int) -> Floats:
        """A layer's router, (experts, source's hidden), with logits that spread as real ones do, by
        one or two."""
        router = self._layers[min(layer, len(self._layers) - 1)]
        rng = np.random.default_rng([self._seed, layer])
        weights = router.weights(self._experts, self._wanted, rng)
        return weights * (1.5 / router.spread(weights))


def routing_of(texts: list[NDArray[np.int64]], experts: int) -> Routing:
    """The skew and locality of choices, given as (tokens, chosen) for each text."""
    counts = np.bincount(np.concatenate(texts).ravel(), minlength=experts)
    falling = np.cumsum(np.sort(counts)[::-1])
    held = int(np.searchsorted(falling, 0.8 * falling[-1])) + 1
    again = [
        len(set(one.tolist()) & set(two.tolist())) / len(two)
        for text in texts
        for one, two in pairwise(text)
    ]
    return Routing(skew=held / experts, locality=float(np.mean(again)))
