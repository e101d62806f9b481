"""Reads the tokenizers of Kimi's models, which have a tiktoken.model and no tokenizer.json.

Beside it lies code that puts the tokenizer together, which is not run. What it does was read
there: a line of the file is a token's bytes, in base64, and its rank, which is its id; the pattern
by which text is split first is in the code alone; behind the ranks are 256 special tokens, those
that tokenizer_config.json does not name being reserved.
Source: tokenization_kimi.py of moonshotai/Kimi-Linear-48B-A3B-Instruct and moonshotai/Kimi-K2-*.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specexec_cli.gguf.container import shown
from specexec_cli.gguf.pre_tokenizers import PATTERNS
from specexec_cli.guarded import read_json
from specexec_cli.models.gguf_tokenizer import splitting

FILE = "tiktoken.model"
_CONFIG = "tokenizer_config.json"
_CLASS = "tokenization_kimi.TikTokenTokenizer"
_SPECIAL_TOKENS = 256
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder with a tiktoken.model.

    Raises:
        ValueError: it is no tokenizer of Kimi's, or a file is damaged.
    """
    config = read_json(folder / _CONFIG)
    code = (config.get("auto_map") or {}).get("AutoTokenizer")
    if _CLASS not in (code if isinstance(code, list) else [code]):
        raise ValueError(f"how {FILE} splits text is in code beside it, which is not run")
    template, said = folder / "chat_template.jinja", config.get("chat_template")
    named, ranks = config.get("added_tokens_decoder") or {}, read_ranks(folder / FILE)
    special = _special_tokens(named, len(ranks))
    found = PreTrainedTokenizerFast(
        tokenizer_object=_backend(ranks, special),
        chat_template=template.read_text("utf-8") if template.is_file() else said,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[each["content"] for each in named.values() if each.get("special")],
        **{role: _content(config[role]) for role in _ROLES if config.get(role)},
    )
    # the library numbers by itself: behind all others, or as a token of the same spelling
    for index, token in special.items():
        if (at := found.convert_tokens_to_ids(token.content)) != index:
            raise ValueError(
                f"{_CONFIG} gives {shown(token.content)} the id {index}, but it is {at}"
            )
    if len(found) != len(ranks) + len(special):
        raise ValueError(f"a special token of {_CONFIG} is not in its added_tokens_decoder")
    return found


def read_ranks(path: Path) -> dict[bytes, int]:
    """A token's rank by its bytes.

    Raises:
        ValueError: a line is not a token and a rank, or the ranks are not 0, 1, 2, ...
    """
    ranks = {}
    for line in path.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks in {path.name} are not 0, 1, 2, ...")
    return ranks


def _special_tokens(named: Mapping[str, Any], first: int) -> dict[int, AddedToken]:
    """The special tokens behind the ranks, by id.

    Args:
        named: those that have a name, by id. The first of them follows on the ranks.
        first: the number of ranks.
    Raises:
        ValueError: they do not follow on the ranks.
    """
    ids = sorted(map(int, named))
    if ids and (ids[0] != first or ids[-1] >= first + _SPECIAL_TOKENS):
        raise ValueError(
            f"{FILE} has {first} tokens, and {_CONFIG} names {shown(ids[0])} to {shown(ids[-1])} "
            "behind them: one of both is cut short or of another model"
        )
    return {index: _added(named, index) for index in range(first, first + _SPECIAL_TOKENS)}


def _backend(ranks: Mapping[bytes, int], special: Mapping[int, AddedToken]) -> Tokenizer:
    """The tokenizer itself: two neighbours that make a token together are one merge, and of those
    in a piece of text the one with the lowest rank is done first."""
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[each] for each in token) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = splitting(PATTERNS["kimi-k2"])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(special.values()))
    return backend


def _added(named: Mapping[str, Any], at: int) -> AddedToken:
    """The special token with an id."""
    said = named.get(str(at)) or {"content": f"<|reserved_token_{at}|>", "special": True}
    return AddedToken(said["content"], special=bool(said.get("special")), normalized=False)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
