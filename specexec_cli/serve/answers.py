"""Makes the objects of OpenAI's protocol: choices, chunks, log-probabilities and usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specexec_cli.core import PassProgress, TokenLogprobs
from specexec_cli.engine.text import Running
from specexec_cli.serve.tools import Call

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def event(found: dict[str, Any]) -> bytes:
    """The bytes of one event of a stream."""
    return b"data: " + json.dumps(found, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


END = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


def finish_reason(text: Running, called: bool = False) -> str | None:
    """Why a text ended, in the protocol's words."""
    return "tool_calls" if called else _FINISH.get(text.finish or "")


def usage(texts: Sequence[Running], per_prompt: int) -> dict[str, Any]:
    """The token counts of a request and, under `specexec`, the statistics of each of its texts.

    Args:
        texts: the request's texts, `per_prompt` for each prompt. A prompt's tokens count once.
    """
    prompt = sum(len(text.request.prompt) for text in texts[::per_prompt])
    generated = sum(text.stats.generated_tokens for text in texts)
    cached = sum(max(text.stats.prompt_tokens - text.stats.prompt_rows, 0) for text in texts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "specexec": [
            {**text.stats.named(), "queue_s": text.waited_s, "seed": text.request.sampling.seed}
            for text in texts
        ],
    }


def progress(texts: Sequence[Running], waiting: int) -> dict[str, Any] | None:
    """The progress of the pass of a request's texts; None if nothing is known."""
    found = next((text for text in texts if text.progress is not None and not text.done), None)
    if found is None or found.progress is None:
        return {"queue": waiting} if any(text.began_s is None for text in texts) else None
    now: PassProgress = found.progress
    return {
        "pass": now.number,
        "layer": now.layer,
        "layers": now.layers,
        "bytes_per_s": now.bytes_per_s,
        "draft_nodes": now.draft_nodes,
        "tokens_per_pass": found.stats.generation_rate,
        "tokens_per_s": found.stats.tokens_per_s,
    }


def tool_calls(calls: Sequence[Call], streamed: bool) -> list[dict[str, Any]]:
    """Calls of functions as the protocol has them, with an index if they are parts of a stream."""
    return [
        {
            **({"index": index} if streamed else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


class Spelling:
    """Writes tokens in lists of log-probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # SentencePiece drops a space at the beginning of a text, so tokens are decoded behind one
        self._before = list(tokenizer.encode("a", add_special_tokens=False))
        self._skipped = len(self._decoded(self._before))

    def text(self, token: int) -> str:
        """The token's text; half a character becomes a replacement character."""
        return self.whole([token])

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of several tokens, special ones included."""
        return self._decoded([*self._before, *tokens])[self._skipped :]

    def _decoded(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self.text(token)
        known = "\ufffd" not in text
        return {
            "token": text,
            "logprob": max(log_prob, -9999.0),
            "bytes": list(text.encode("utf-8")) if known else None,
        }

    def chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The field `logprobs` of a chat completion's choice."""
        return {
            "content": [
                {
                    **self._entry(one.token, one.log_prob),
                    "top_logprobs": [self._entry(*other) for other in one.top],
                }
                for one in tokens
            ],
            "refusal": None,
        }

    def completion(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The field `logprobs` of a completion's choice; its text begins at character `offset`."""
        texts = [self.text(one.token) for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(one.log_prob, -9999.0) for one in tokens],
            "top_logprobs": [
                {self.text(token): max(value, -9999.0) for token, value in one.top}
                for one in tokens
            ],
            "text_offset": offsets,
        }
