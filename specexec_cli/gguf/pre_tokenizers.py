"""How a GGUF file's byte-level vocabulary splits text before its merges, by `tokenizer.ggml.pre`.

Merges never cross the border of two pieces, so a vocabulary that is split otherwise gives other
tokens. Every pattern cuts what the pattern before it left: its matches become pieces, and what lies
between them too. Patterns are those of the makers' tokenizer.json where llama.cpp quotes it, and
llama.cpp's own otherwise (names, patterns and both sets: src/llama-vocab.cpp of
ggml-org/llama.cpp, b11549); tests/unit/test_pre_tokenizers.py holds each to llama.cpp's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}"
# words by the case of their letters: "HTTPServer" is "HTTPS" and "erver", as GPT-4o has it
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED = (
    rf"{_START}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|{_START}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
)
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = (
    rf"{_START}[{_UPPER}]*[{_LOWER}]+|{_START}[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARK_OR_WORD = rf"{_ASCII_MARK}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_HAN_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"{_START}[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_CONTRACTIONS}?"
    rf"|{_START}[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_CONTRACTIONS}?"
)
# letters of two cases; DeepSeek's first tokenizers list them, without those of mathematics
_CASED_LETTERS = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]"
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+"
    rf"|{_HAN_KANA}"
)
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_WIDE_MARKS = r"\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
     (_GPT2,)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe"
     " chatglm-bpe glm4", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", (_QWEN2,)),
    ("qwen35", (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)),
    ("laguna", (r"[^\n]+|[\n]+", _QWEN2)),
    ("ufakzeka", (rf"{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}",)),
    ("seed-coder", (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ("bailingmoe bailingmoe2 llada-moe",
     (rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("exaone-moe", (rf"{_CONTRACTIONS}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ("minicpm5", (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_MARKS}|{_SPACES}")),
    ("jais-2", (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|"
                + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"|\s{1,2}(?!\S)|\s{1}",)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("tekken", (_TEKKEN,)),
    ("youtu", (_YOUTU, rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")),
    ("kimi-k2", (rf"\p{{Han}}+|{_KIMI}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",)),
    ("deepseek-llm", ("[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?[!-/:-~{_WIDE_MARKS}]+",
                      r"\s+$", _CJK, r"\p{N}+")),
    ("deepseek-coder", ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4",
     (r"\p{N}{1,3}", _HAN_KANA, rf"{_MARK_OR_WORD}[\r\n]*|{_SPACES}")),
    ("spark2_5", (r"\p{N}{1,3}", _HAN_KANA, rf"{_MARK_OR_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ("afmoe", (r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))", _ASIAN,
               rf"{_MARK_OR_WORD}[\r\n]*|{_SPACES}")),
    ("bloom gpt3-finnish poro-chat", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
)  # fmt: skip

PATTERNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: patterns for names, patterns in _GROUPS for name in names.split()}
)
# a piece that is a token needs no merges
WHOLE_PIECES = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano", "tekken", "youtu", "minicpm5", "glm4")
)  # fmt: skip
# a text begins with the beginning-of-text token unless the file says otherwise
BEGINS = WHOLE_PIECES - {"youtu", "minicpm5", "glm4"}
