"""The classifier of the policy disco: how likely it is that a drafted token will be accepted.

A feed-forward network of two layers reads the draft model's ten highest probabilities, its entropy,
and the token's position counted from the beginning of the generation. It gives the probability that
the token just drafted will be accepted. Drafting ends when that is below a threshold, or at a
greatest length; both were tuned for latency. lab/training.py trains it, policies/disco.py uses it.

Source: Mamou et al., arXiv:2405.04304, section 3 and appendix D.1.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specexec_cli.drafting.search import Floats, Ints
from specexec_cli.errors import CheckpointError
from specexec_cli.kept import read_json, replacing, write_json

FEATURES = 12  # the 11 signals (policies.Signals), and the position
SCHEMA = 2  # schema 1 counted positions from the beginning of the draft
_SHAPES = {"norm.mean": (FEATURES,), "norm.scale": (FEATURES,), "hidden.weight": (-1, FEATURES),
           "hidden.bias": (-1,), "out.weight": (1, -1), "out.bias": (1,)}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Classifier:
    """A trained classifier, and when drafting ends by it."""

    tensors: dict[str, Floats]  # by name, of the shapes in _SHAPES
    threshold: float  # drafting ends when the probability of acceptance is below
    max_length: int  # the most tokens of a draft

    def probabilities(self, features: Floats) -> Floats:
        """The probability that each token is accepted, (n,), from its features (n, FEATURES)."""
        t = self.tensors
        scaled = (features - t["norm.mean"]) * t["norm.scale"]
        hidden = np.maximum(scaled @ t["hidden.weight"].T + t["hidden.bias"], 0.0)
        logits = hidden @ t["out.weight"][0] + t["out.bias"]
        return np.exp(-np.logaddexp(0.0, -logits))  # type: ignore[no-any-return]

    def chance(self, signals: Floats, positions: Ints, log_probs: Floats) -> float:
        """The mean probability that tokens of a tree's level are accepted, weighted by how probable
        each token is.

        Args:
            signals: (n, 11) signals of the tokens' parents; see policies.Signals.
            positions: (n,) positions of the tokens; the first generated token has position 1.
            log_probs: (n,) cumulative log-probabilities of the tokens.
        """
        features = np.column_stack([signals, positions])
        weights = np.exp(log_probs)
        return float(weights @ self.probabilities(features) / weights.sum())

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Writes disco.safetensors and disco.json.

        Args:
            about: describes models and training; `load_classifier` compares "target" and "draft".
        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "disco.safetensors") as partial:
            save_file(self.tensors, partial)
            digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        text = {"schema": SCHEMA, **about, "threshold": self.threshold,
                "max_length": self.max_length, "sha256": digest}  # fmt: skip
        write_json(folder / "disco.json", text, indent=2)


def load_classifier(folder: Path, target: str, draft: str) -> Classifier:
    """Reads the classifier that was trained for a pair.

    Raises:
        CheckpointError: there is none, it is damaged, or it is another pair's.
    """
    mend = f"train it: specexec train-policy {target} --draft {draft} --dataset NAME"
    about_path, weights_path = folder / "disco.json", folder / "disco.safetensors"
    if not about_path.exists():
        raise CheckpointError(f"`policy='disco'` has no classifier for this pair: {mend}")
    try:
        about = read_json(about_path)
        if about["schema"] != SCHEMA:
            raise ValueError(f"schema {about['schema']}, not {SCHEMA}")
        if (about["target"], about["draft"]) != (target, draft):
            raise ValueError(f"of {about['target']} with {about['draft']}")
        if hashlib.sha256(weights_path.read_bytes()).hexdigest() != about["sha256"]:
            raise ValueError("not the weights that were saved with it")
        tensors = {
            name: array.astype(np.float64) for name, array in load_file(weights_path).items()
        }
        _check_shapes(tensors)
        threshold, length = float(about["threshold"]), int(about["max_length"])
        if not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0 and 1 <= length <= 65536):
            raise ValueError(f"threshold {threshold} or length {length} out of range")
    except (
        OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError
    ) as error:  # fmt: skip
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"the classifier in {about_path} cannot be used ({what}): {mend}"
        ) from error
    return Classifier(tensors, threshold, length)


def _check_shapes(tensors: dict[str, Floats]) -> None:
    if set(tensors) != set(_SHAPES):
        raise ValueError(f"tensors {', '.join(sorted(tensors))}")
    width = len(tensors["hidden.bias"])
    for name, shape in _SHAPES.items():
        wanted = tuple(width if size < 0 else size for size in shape)
        if tensors[name].shape != wanted or not np.isfinite(tensors[name]).all():
            raise ValueError(f"{name} must be {wanted} finite numbers")
