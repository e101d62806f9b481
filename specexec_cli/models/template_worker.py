"""The program that renders chat templates, in a process whose time and memory have a limit.

A template comes with a checkpoint and is a program. Its sandbox keeps it from the system, but not
from loops without end or strings without measure, and nothing but the end of its process stops
those. Each line of the input is a request, each line of the output what came of it.

It runs as a file, without the package around it, so that it starts soon.
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

# Around special tokens that a message spells out, which are text there. Unicode keeps these two
# characters out of all texts, for programs to use among themselves.
OPENS, CLOSES = "\ufdd0", "\ufdd1"
SPELLED = re.compile(f"{OPENS}([^{OPENS}{CLOSES}]*){CLOSES}|[{OPENS}{CLOSES}]")  # or a lone mark


def marked(value: Any, tokens: Collection[str]) -> Any:
    """A message or a tool, its tokens marked wherever text stands in it, keys included."""
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
    """What a request's template makes of its messages, or why nothing."""
    special, named = set(asked["special"]), set(asked["special"]) | set(asked["named"])
    # a model writes the marks of its thinking and of its calls itself
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
    except Exception as error:  # a template raises what it likes (jinja2.TemplateError)
        return {"refuses": str(error)[:1000]}
    if len(text) > asked["most_characters"]:
        return {"exceeds": f"writes more than {asked['most_characters']} characters"}
    return {"text": text}


def _limit_memory(most_bytes: int) -> None:
    """Memory beside what the process has by now; macOS does not hold to such a limit."""
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + most_bytes, resource.RLIM_INFINITY))


def main() -> None:
    """Answers requests until the input ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed, and slow to load
    from transformers.utils.chat_template_utils import render_jinja_template

    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)  # noqa: TID251  # this program itself has written it
        # in seconds of this process alone, however busy the machine is; ends it
        signal.setitimer(signal.ITIMER_PROF, asked["most_s"])
        _limit_memory(asked["most_bytes"])
        answer = json.dumps(_rendered(asked, render_jinja_template))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
