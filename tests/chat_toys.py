"""A session without models: it answers at once, or slowly layer by layer, in bursts of characters.

Run as a program it is `specexec chat` on such a session, for tests that drive a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specexec_cli.chat.settings import ChatSettings
from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.errors import ConfigError, StreamError

SPECIAL = {"<|bos|>": 0x110000, "<|system|>": 0x110001, "<|user|>": 0x110002,
           "<|assistant|>": 0x110003, "<|end|>": 0x110004}  # fmt: skip
END = SPECIAL["<|end|>"]

MARKDOWN = """# A heading

Some *text* with `code` and std::vector<int>, which runs on beyond eighty columns so that it wraps.

- one
- two

```python
def double(x):
    return 2 * x
```

| name | value |
|---|---|
| wide | 漢字 |
"""


def canned(message: str, seed: int) -> str:
    """The reply to a message."""
    word, _, rest = message.partition(" ")
    if word == "say":
        return rest
    if word in ("slow", "stall"):
        return " ".join(f"word{n}" for n in range(1, (int(rest) if rest.isdigit() else 200) + 1))
    if word == "markdown":
        return MARKDOWN
    if word == "think":
        return "<think>\nLet me see.\n</think>\n\nThe answer is 42."
    if word == "lines":
        return "\n".join(f"line {n}" for n in range(1, int(rest) + 1))
    if word == "control":
        return "\x1b[31mred\x1b[2J\x07 text"
    if word == "seed":
        return f"seed {seed}"
    if word == "wide":
        return "漢字かな 한글 e\u0301a\u0308 👩‍👩‍👧 done"
    return f"You said {len(message)} characters."


class Recorder:
    """A screen that remembers; also the view of its replies."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.errors: list[str] = []
        self.rows: dict[str, str] = {}
        self.shown = ""
        self.agrees = True

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)

    def echo(self, text: str) -> None:
        pass

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        self.rows.update(rows)

    def stats(self, stats: GenerationStats) -> None:
        pass

    def confirm(self, question: str) -> bool:
        self.notices.append(question)
        return self.agrees

    @contextmanager
    def reply(self, prompt: str, settings: ChatSettings) -> Iterator[Recorder]:
        self.shown = ""
        yield self

    def layer(self, progress: PassProgress) -> None:
        pass

    def step(self, step: StepResult) -> None:
        self.shown += step.text

    def stopping(self) -> None:
        pass


class ToySession:
    """Looks like a Session; every character is a token."""

    def __init__(
        self,
        reply: Callable[[str, int], str] = canned,
        *,
        burst: int = 5,
        layer_s: float = 0.0,
        layers: int = 4,
        context_length: int = 4096,
        draft: bool = True,
        rewrites: bool = False,
    ) -> None:
        named = SimpleNamespace(name="toy-draft") if draft else None
        self.pair = SimpleNamespace(
            name="toy",
            target=SimpleNamespace(name="toy-target"),
            draft=named,
            tree=TreeConfig(),
            draft_name=named and named.name,
        )
        self.settings = {"offload": "none", "device": "toy", "dtype": "float32"}
        self.special_tokens: Mapping[str, int] = SPECIAL
        self.context_length = context_length
        self.stats = GenerationStats()
        self.context: list[int] = []
        self.prompts: list[list[int]] = []
        self.methods: list[str | None] = []
        self.prepared: list[list[int]] = []
        self.fails_after: int | None = None  # steps
        self.on_step: Callable[[int], None] = lambda number: None
        self._reply, self._burst, self._layers, self.layer_s = reply, burst, layers, layer_s
        self._rewrites = rewrites  # the template drops the thinking parts of old replies
        self._callback: Callable[[PassProgress], None] = lambda progress: None

    def on_layer(self, callback: Callable[[PassProgress], None]) -> None:
        self._callback = callback

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if any(m["role"] == "system" and "forbidden" in m["content"] for m in messages):
            raise ConfigError("the chat template of toy-target refuses this conversation")
        contents = [
            m["content"].rpartition("</think>")[2] if self._rewrites else m["content"]
            for m in messages
        ]
        turns = (f"<|{m['role']}|>{c}<|end|>" for m, c in zip(messages, contents, strict=True))
        return f"<|bos|>{''.join(turns)}<|assistant|>"

    def encode_rendered(self, text: str) -> list[int]:
        tokens = []
        while text:
            special = next((s for s in SPECIAL if text.startswith(s)), None)
            tokens.append(SPECIAL[special] if special else ord(text[0]))
            text = text[len(special or text[0]) :]
        return tokens

    def prepare(self, prompt: Sequence[int], max_tokens: int) -> None:
        self.prepared.append(list(prompt))

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        tree: TreeConfig,
        generation: GenerationConfig,
        method: str | None = None,
    ) -> Iterator[StepResult]:
        self.prompts.append(list(prompt))
        self.methods.append(method)
        known = 0
        while known < min(len(self.context) - 1, len(prompt) - 1) and (
            self.context[known] == prompt[known]
        ):
            known += 1
        self.context = list(prompt)
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        return self._steps(prompt, len(prompt) - known, sampling, generation, method)

    def _steps(
        self,
        prompt: Sequence[int],
        rows: int,
        sampling: SamplingConfig,
        generation: GenerationConfig,
        method: str | None,
    ) -> Iterator[StepResult]:
        last = max(i for i, token in enumerate(prompt) if token == SPECIAL["<|user|>"])
        message = "".join(chr(t) for t in prompt[last + 1 :] if t < 0x110000)
        tokens = [*map(ord, self._reply(message, sampling.seed)), END]
        limit = min(generation.max_tokens, self.context_length - len(prompt))
        burst = 1 if method == "autoregressive" else self._burst
        started = time.perf_counter()
        for number, start in enumerate(range(0, limit, burst)):
            if number == self.fails_after:
                raise StreamError("layer 3: the disk is gone")
            for layer in range(self._layers):
                stalled = message.startswith("stall") and number > 0
                time.sleep(20 if stalled else self.layer_s or 0.01 * message.startswith("slow"))
                self._callback(PassProgress(
                    number=number + 1, layer=layer + 1, layers=self._layers,
                    bytes_per_s=21.3e9 if layer else 0.0, draft_nodes=118,
                ))  # fmt: skip
            part = tokens[start : min(start + burst, limit)]
            done = part[-1] == END
            finish = "eos" if done else "length" if start + burst >= limit else None
            pieces = tuple("" if token == END else chr(token) for token in part)
            step = StepResult(
                tokens=tuple(part), drafted=(True,) * (len(part) - 1) + (False,), tree_nodes=118,
                tree_depth=5, draft_s=0.1, verify_s=0.1, bytes_streamed=10**9,
                pending_rows=1 if number else rows, text="".join(pieces), pieces=pieces,
                finish_reason=finish,
            )  # fmt: skip
            if number == 0:
                self.stats.prompt_rows = rows
            self.context += part
            self.stats.add(step)
            self.stats.total_s = time.perf_counter() - started
            yield step
            self.on_step(number)
            if finish:
                return


def main() -> None:
    """`chat_toys.py NAME=VALUE...`: settings of the session, of the chat, and of converse()."""
    from specexec_cli.chat.settings import ChatSettings
    from specexec_cli.chat.transcript import load
    from specexec_cli.cli.chat import converse

    options: dict[str, Any] = dict(word.split("=", 1) for word in sys.argv[1:])
    numbers = {"burst": int, "layer_s": float, "context_length": int}
    session = ToySession(**{k: f(options.pop(k)) for k, f in numbers.items() if k in options})
    if "resume" in options:
        options["resume"] = Path(options["resume"])
        options["loaded"] = load(options["resume"])
    shown = {key: options.pop(key) == "1" for key in ("show_drafts", "thinking") if key in options}
    settings = ChatSettings(generation=GenerationConfig(max_tokens=2000), **shown)
    sys.exit(converse(session, settings, **options))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
