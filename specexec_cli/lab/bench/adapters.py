"""Adapters, one for each dataset: they turn a record into a prompt in the form the papers used.

Chat prompts get the target's own chat template. Templates that a file already contains (such as the
malformed ones in SpecExec's OpenAssistant sample) are removed first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = tuple[str, str]  # role (user or assistant), text


class RecordError(Exception):
    """A record that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    id: str
    messages: tuple[Message, ...]  # a raw prompt has one message, by the user
    chat: bool

    @property
    def text(self) -> str:
        """The conversation without any template, for a base model."""
        return "\n\n".join(text for _, text in self.messages)


# (record, its number) -> a prompt, or None if the record is to be skipped
Adapt = Callable[[Any, int], Prompt | None]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The places of a dataset and the function that reads its records."""

    name: str
    adapt: Adapt
    files: tuple[str, ...]  # the dataset's usual file names in a data folder
    hub: tuple[str, ...]  # arguments of datasets.load_dataset
    split: str
    parts: bool = False  # whether the hub has splits for training, validation and tests


def raw(name: object, text: str) -> Prompt:
    """A prompt whose text is to be continued."""
    if not isinstance(text, str):
        raise RecordError(f"the prompt is {type(text).__name__}, not text")
    if not text.strip():
        raise RecordError("the prompt is empty")
    return Prompt(str(name), (("user", text),), False)


def chat(name: object, *turns: str) -> Prompt:
    """A prompt of alternating turns; the user has the first and the last."""
    messages = tuple(
        ("assistant" if number % 2 else "user", raw(name, turn).text.strip())
        for number, turn in enumerate(turns)
    )
    return Prompt(str(name), messages, True)


def _open_assistant(record: Any, number: int) -> Prompt | None:
    """Reads SpecExec's sample ([id, text], Llama-2 template with broken tags) or OASST1's rows."""
    if isinstance(record, Mapping):
        if record["role"] != "prompter" or record.get("parent_id") is not None:
            return None
        return chat(record["message_id"], record["text"])
    name, text = record
    _, system_end, rest = text.partition("<</SYS>")
    turns = re.split(r"\[/?\\?/?INST\]", rest.removeprefix(">") if system_end else text)
    turns = [turn for turn in turns if turn.strip()]
    if len(turns) % 2 == 0:
        raise RecordError("the conversation does not end with the user's turn")
    return chat(name, *turns)


def _mt_bench(record: Any, number: int) -> Prompt:
    """The first turn, from FastChat's questions, the hub, or SpecExec's file with a template."""
    if isinstance(record, Mapping) and "turns" in record:
        return chat(record.get("question_id", number), record["turns"][0])
    if isinstance(record, Mapping):
        return chat(record["prompt_id"], record["prompt"][0])
    name, text = record
    return chat(name, text.removeprefix("[INST]").split("[/INST]")[0])


def _long_text(record: Any, number: int) -> Prompt | None:
    """WikiText-2 and C4: beginnings of articles to continue. Too short lines are skipped."""
    if not isinstance(record, Mapping):
        name, text = record
        return raw(name, text)
    text = record["text"]
    return raw(number, text.strip()) if len(text) >= 200 else None


def _human_eval(record: Any, number: int) -> Prompt:
    """The unchanged prompt, as in DSI, appendix B.2, and DISCO, appendix B.2."""
    return raw(record["task_id"], record["prompt"])


def _mbpp(record: Any, number: int) -> Prompt:
    """The task and one test, as in DSI, figure 2, and DISCO, figure 7.

    The quotation marks are part of the prompt, which code models read as a docstring. Both papers
    follow an evaluation harness that does the same.
    """
    task, test = record.get("text") or record["prompt"], record["test_list"][0]
    return raw(record.get("task_id", number), f'"""{task}\n{test}\n"""')


def _cnn_dailymail(record: Any, number: int) -> Prompt:
    """The prompt of DSI, figure 3, and DISCO, figure 8, without those figures' Python quotes."""
    return raw(record.get("id", number), f"Summarize:\n{record['article']}\nSummary:\n")


def _alpaca(record: Any, number: int) -> Prompt:
    """Stanford Alpaca's own prompt, as in DSI, figures 4 and 5, and DISCO, figures 9 and 10."""
    given = (record.get("input") or "").strip()
    head = "Below is an instruction that describes a task"
    head += ", paired with an input that provides further context. " if given else ". "
    head += "Write a response that appropriately completes the request."
    parts = [head, f"### Instruction:\n{record['instruction']}"]
    parts += [f"### Input:\n{given}"] if given else []
    return raw(record.get("id", number), "\n\n".join([*parts, "### Response:\n"]))


def any_record(record: Any, number: int) -> Prompt:
    """Reads a text, an [id, text] pair, or an object with a usual field."""
    if isinstance(record, str):
        return raw(number, record)
    if isinstance(record, Sequence) and len(record) == 2:
        return raw(record[0], record[1])
    if not isinstance(record, Mapping):
        raise RecordError(f"a prompt is text, [id, text] or an object, not {type(record).__name__}")
    name = next((record[k] for k in ("id", "task_id", "question_id") if k in record), number)
    if isinstance(record.get("messages"), Sequence):
        return chat(name, *(message["content"] for message in record["messages"]))
    if isinstance(record.get("turns"), Sequence):
        return chat(name, record["turns"][0])
    for field in ("prompt", "text", "question", "instruction"):
        if field in record:
            return (
                chat(name, record[field])
                if record.get("kind") == "chat"
                else raw(name, record[field])
            )
    raise RecordError(
        "no field 'prompt', 'text', 'question', 'instruction', 'turns' or 'messages' "
        f"(found: {', '.join(record) or 'none'})"
    )


ADAPTERS: Mapping[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter("oasst", _open_assistant, ("oasst_prompts.json", "oasst.jsonl"),
                ("OpenAssistant/oasst1",), "validation"),
        Adapter("wikitext2", _long_text, ("wikitext_prompts.json", "wikitext2.jsonl"),
                ("Salesforce/wikitext", "wikitext-2-raw-v1"), "test"),
        Adapter("c4", _long_text, ("c4_prompts.json", "c4.jsonl"),
                ("allenai/c4", "en"), "validation"),
        Adapter("mt-bench", _mt_bench, ("mt_bench_question.jsonl", "mtbench_prompts.json"),
                ("HuggingFaceH4/mt_bench_prompts",), "train"),
        Adapter("humaneval", _human_eval, ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
                ("openai/openai_humaneval",), "test"),
        Adapter("mbpp", _mbpp, ("mbpp.jsonl", "sanitized-mbpp.json"),
                ("google-research-datasets/mbpp", "full"), "test", parts=True),
        Adapter("cnn-dailymail", _cnn_dailymail, ("cnn_dailymail.jsonl", "cnn_dailymail.parquet"),
                ("abisee/cnn_dailymail", "2.0.0"), "test", parts=True),
        Adapter("alpaca", _alpaca, ("alpaca_data.json", "alpaca.jsonl"),
                ("tatsu-lab/alpaca",), "train"),
    )
}  # fmt: skip
