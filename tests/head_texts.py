"""The texts that sessions with trained heads write, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.planning.request import Request
from specexec_cli.session import open_session

PROMPTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 30, 31, 32], [40])


def texts(
    folder: Path | str,
    sampling: SamplingConfig,
    tokens: int = 16,
    prompts: Sequence[list[int]] = PROMPTS,
    **request: object,
) -> list[list[list[int]]]:
    """What each pass committed behind each prompt, one text after another in one session.

    Args:
        folder: the target's.
        tokens: of each text.
        request: what is asked for besides.
    """
    asked = Request(model=str(folder), device="cpu", context_tokens=64, **request)
    ending = GenerationConfig(max_tokens=tokens)
    with open_session(asked) as session:
        return [
            [
                list(step.tokens)
                for step in session.generate(prompt, sampling=sampling, generation=ending)
            ]
            for prompt in prompts
        ]


def together(
    folder: Path | str, sampling: SamplingConfig, prompts: Sequence[list[int]] = PROMPTS,
    **request: object,
) -> list[list[list[int]]]:  # fmt: skip
    """What each pass committed to each text where all of them share passes."""
    asked = Request(
        model=str(folder), device="cpu", context_tokens=64, slots=len(prompts), **request
    )
    ending = GenerationConfig(max_tokens=16)
    with open_session(asked) as session:
        engine = open_engine(session, slots=len(prompts), most_waiting=len(prompts))
        running = [
            engine.submit(TextRequest(prompt=tuple(each), sampling=sampling, generation=ending))
            for each in prompts
        ]
        found = [[list(step.tokens) for step in text] for text in running]
        engine.close()
    return found


def joined(steps: list[list[list[int]]]) -> list[list[int]]:
    """The tokens of each text."""
    return [[token for step in text for token in step] for text in steps]
