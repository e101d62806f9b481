"""What a kept text spares and costs: two starts of a prompt, the second with the first's rows.

    python scripts/measure_kept.py MODEL [--tokens 8000] [--text 64] [--draft DRAFT] [--kv 8bit]
        [--typing SECONDS]

With --typing the second start is that of a chat: what is kept is read while a message is typed for
so long, and only what is read behind that counts.
Each start opens a session of its own, in this process, over a cache folder that is removed at the
end. Passes, rows and bytes are counts. The first text of the second start waits for one pass and
for the rows to be read: told in passes, by the bytes of both. What writing costs is the processor
time of the threads that write, over that of the whole process while the text was made, so that
other programs disturb it little. A rig is opened with a context window that is long enough,
whatever its config.json says: its text is none that anybody reads. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from specexec_cli.config import GenerationConfig
from specexec_cli.prefixes.folder import kept_prefixes
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession


def written_s() -> float:
    """Processor time, in seconds, of the threads that write rows."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name == "prefixes" and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


def with_window(model: Path, tokens: int, scratch: Path) -> Path:
    """The model's folder, or a folder of links to its files whose config.json allows `tokens`."""
    config = json.loads((model / "config.json").read_text())
    if config.get("max_position_embeddings", tokens) >= tokens:
        return model
    folder = scratch / model.name
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    changed = json.dumps({**config, "max_position_embeddings": tokens})
    (folder / "config.json").write_text(changed)
    return folder


def start(asked: argparse.Namespace, typing_s: float = 0.0) -> dict[str, Any]:
    """Opens a session, writes the text, and counts.

    Args:
        typing_s: how long a message is typed, while rows are read.
    """
    with Session.open(
        model=asked.model, draft=asked.draft, offload="ssd", dtype=asked.dtype, kv=asked.kv,
        remember=True,
        method="autoregressive" if asked.draft is None else "specexec",
        context_tokens=asked.tokens + asked.text,
    ) as session:  # fmt: skip
        assert isinstance(session, LocalSession)
        words = session.target.model.vocab_size
        numbers = (each * each + 7 * each for each in range(asked.tokens))
        prompt = [words // 20 + number % (words // 2) for number in numbers]
        if typing_s:
            session.prepare(prompt, asked.text)
            time.sleep(typing_s)
        ahead = len(session.target.tokens)
        before_s, began_s = time.process_time(), time.perf_counter()
        text, first_s, passes_to_first = [], 0.0, 0
        for step in session.generate(prompt, generation=GenerationConfig(max_tokens=asked.text)):
            if not text:
                first_s = time.perf_counter() - began_s
                passes_to_first = session.stats.target_passes
            text += step.tokens
        time.sleep(1.0)  # the last rows are written now
        stats = session.stats
        return {
            "text": text, "passes_to_first_text": passes_to_first, "passes": stats.target_passes,
            "prompt_rows": stats.prompt_rows, "rows_ahead": ahead, "first_text_s": first_s,
            "pass_bytes": stats.bytes_streamed // stats.target_passes,
            "text_processor_s": time.process_time() - before_s, "writing_processor_s": written_s(),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv", default="full")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--text", type=int, default=64)
    parser.add_argument("--typing", type=float, default=0.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        if (Path(asked.model) / "config.json").is_file():
            needed = asked.tokens + asked.text
            asked.model = str(with_window(Path(asked.model), needed, Path(folder)))
        starts = [start(asked), start(asked, asked.typing)]
        kept_bytes = sum(each.size_bytes for each in kept_prefixes())
    first, second = starts
    same = first.pop("text") == second.pop("text")
    rows = asked.tokens - second["prompt_rows"] - second["rows_ahead"]
    row_bytes = kept_bytes * rows // (asked.tokens + asked.text)
    found = {
        "model": Path(asked.model).name, "machine": platform.processor() or platform.machine(),
        "kv": asked.kv, "tokens": asked.tokens, "same_text": same, "first": first, "second": second,
        "kept_bytes": kept_bytes,
        "passes_by_bytes": second["passes_to_first_text"] + row_bytes / second["pass_bytes"],
        "writing_share": first["writing_processor_s"]
        / (first["text_processor_s"] - first["writing_processor_s"]),
    }  # fmt: skip
    for name, each in (("first start", first), ("second", second)):
        print(
            f"{name}: {each['passes_to_first_text']} passes and {each['prompt_rows']} rows of the "
            f"prompt to the first text, {each['first_text_s']:.1f} s"
        )
    print(
        f"{second['rows_ahead']} rows of the second were read while a message was typed; the "
        f"others are {row_bytes / 1e6:.0f} MB from the disk: with them "
        f"{found['passes_by_bytes']:.2f} passes of {second['pass_bytes'] / 1e6:.0f} MB"
    )
    print(f"writing took {found['writing_share']:.2%} of the first text's processor time")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
