"""A program that renders chat templates in a process with limited time and memory.

A template comes with a checkpoint and is itself a program. Its sandbox keeps it away from the
system, but cannot stop endless loops or huge strings; only ending the process can. Each line of the
input is a request, and each line of the output is the answer to one.

The program runs as a single file without importing the package, so that it starts quickly.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

# Marks around special tokens that a message spells out and that must stay text. Unicode reserves
# these two characters for use inside programs, so no valid text contains them.
OPENS, CLOSES = "\ufdd0", "\ufdd1"
SPELLED = re.compile(f"{OPENS}([^{OPENS}{CLOSES}]*){CLOSES}|[{OPENS}{CLOSES}]")  # or a single mark


def marked(value: Any, tokens: Collection[str]) -> Any:
    """A message or tool with marks around `tokens` in all of its strings, keys included."""
    if isinstance(value, str):
        return _marked_text(value.replace(OPENS, "").replace(CLOSES, ""), tokens)
    if isinstance(value, dict):
        return {marked(key, tokens): marked(each, tokens) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [marked(each, tokens) for each in value]
    return value


def _marked_text(text: str, tokens: Collection[str]) -> str:
    if not tokens:
        return text
    first = re.compile(f"[{''.join(re.escape(one) for one in {token[0] for token in tokens})}]")
    lengths = sorted({len(token) for token in tokens}, reverse=True)
    parts, told = [], 0
    for place in first.finditer(text):
        at = place.start()
        for length in lengths if at >= told else ():
            if (token := text[at : at + length]) in tokens:
                parts += [text[told:at], OPENS, token, CLOSES]
                told = at + length
                break
    return "".join([*parts, text[told:]])


def _rendered(asked: dict[str, Any], render: Any) -> dict[str, str]:
    """Answers a request: the rendered text, or why there is none."""
    special, named = set(asked["special"]), set(asked["special"]) | set(asked["named"])
    # `named` tokens (marks of thinking and of tool calls) stay tokens in the model's own messages
    messages = [
        marked(message, special if message.get("role") == "assistant" else named)
        for message in asked["messages"]
    ]
    try:
        (text,), _ = render(
            conversations=[messages], tools=marked(asked["tools"], named),
            chat_template=asked["template"], add_generation_prompt=True, **asked["variables"],
        )  # fmt: skip
    except MemoryError:
        return {"exceeds": f"takes more than {asked['most_bytes'] >> 20} MB of memory"}
    except Exception as error:  # a template can raise anything (usually jinja2.TemplateError)
        return {"refuses": str(error)[:1000]}
    if len(text) > asked["most_characters"]:
        return {"exceeds": f"writes more than {asked['most_characters']} characters"}
    return {"text": text}


def _limit_memory(most_bytes: int) -> None:
    """Limits the memory that the process may add to its present size; has no effect on macOS."""
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + most_bytes, resource.RLIM_INFINITY))


def main() -> None:
    """Answers requests until the input ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed, and slow to import
    from transformers.utils.chat_template_utils import render_jinja_template

    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)  # noqa: TID251  # this program itself has written it
        # Ends the process after this many seconds of its own CPU time, however busy the machine is.
        signal.setitimer(signal.ITIMER_PROF, asked["most_s"])
        _limit_memory(asked["most_bytes"])
        answer = json.dumps(_rendered(asked, render_jinja_template))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
