"""A large BPE tokenizer that begins with the tokens that a short text can become.

To build a model of 262,144 tokens and 514,906 merges takes the tokenizers library a second, in
which Python stands still. Merging begins with a text's characters and joins neighbours, so nothing
but what is spelled by neighbours in the text can come of it: with these tokens and the merges among
them a text becomes the same tokens as with all. The whole vocabulary is read once a text is long,
once there were many texts, or once anything else is asked of the tokenizer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from specexec_cli.models.merges import Merges

_MOST_CHARACTERS = 4000  # of texts at once; candidates grow with them
_LONGEST = 300  # characters of a token; candidates grow with them, too
_MOST_TEXTS = 8  # with new tokens, before all are read
_SETTINGS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
_BYTES = [f"<0x{n:02X}>" for n in range(256)]  # the tokens of bytes that are in no other
# options of encoding that look at other things than added tokens and pieces
_WHOLE = ("split_special_tokens", "sanitize_control_tokens", "is_split_into_words")
_NONE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


class GrowingVocabulary:
    """A tokenizer of the library whose model has the tokens that were needed so far.

    Attributes:
        backend: the tokenizer. Its added tokens, normalizer, splits and decoder are complete.
        tokens: all tokens by their ids.
    """

    def __init__(self, frame: Mapping[str, Any], ids: dict[str, int], merges: Merges) -> None:
        """Takes a tokenizer apart from its vocabulary.

        Args:
            frame: the tokenizer as its JSON has it; its model needs no tokens. The ids of its
                added tokens are those of the whole vocabulary.
            ids: the whole vocabulary as the model spells it, from 0 in order.
            merges: between its tokens.
        Raises:
            ValueError: it is of a kind that cannot grow.
        """
        model, self.tokens, self._ids = frame["model"], list(ids), ids
        self._merges: Merges | None = merges
        unknown = {model["unk_token"]} - {None}
        needed = unknown.union(ByteLevel.alphabet() if model["ignore_merges"] else ())
        added = {each["id"] for each in frame["added_tokens"]}
        if (
            model["type"] != "BPE"
            or any(model[name] for name in _NONE)
            or not needed <= ids.keys()
            or max(added, default=0) >= len(ids)
            or max(map(len, ids)) > _LONGEST
        ):
            raise ValueError("this tokenizer cannot grow")
        always = added | {ids[token] for token in (*_BYTES, *unknown) if token in ids}
        self._kept = {index: self.tokens[index] for index in sorted(always)}
        small = {token: index for index, token in self._kept.items()}
        model = {**model, "vocab": small, "merges": []}
        self.backend = Tokenizer.from_str(json.dumps({**frame, "model": model}))
        self._settings = {name: model[name] for name in _SETTINGS}
        self._longest = max(map(len, self.tokens))
        self._reached: set[int] = set()  # tokens that are kept and that texts can become
        self._texts: set[str] = set()

    @property
    def is_whole(self) -> bool:
        return self._merges is None

    def complete(self) -> None:
        """Takes the whole vocabulary; does nothing where it is there."""
        if self._merges is not None:
            pairs = self._merges.all()
            self.backend.model = models.BPE(vocab=self._ids, merges=pairs, **self._settings)
            self._merges = None
            self.tokens, self._ids = [], {}

    def prepare(self, tokens: Iterable[str]) -> None:
        """Takes tokens that will be added to the backend, which numbers those that it lacks anew.

        The whole vocabulary is read where it lacks one of them, too: the new number follows on it.
        """
        ids = {token: self._ids.get(token) for token in tokens}
        if None in ids.values():
            self.complete()
        elif not self._kept.keys() >= set(ids.values()):
            self._keep(ids)
            self.backend.model = self._model([])

    def grow(self, texts: Iterable[str]) -> bool:
        """Takes the tokens that texts can become; False if the whole vocabulary is called for."""
        for text in texts:
            if text not in self._texts:
                if len(self._texts) == _MOST_TEXTS:
                    return False
                self._texts.add(text)
                self._take(text)
        return True

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of tokens, as the library's tokenizer decodes it."""
        special = self._special if skip_special_tokens else frozenset()
        known = [index for index in ids if 0 <= index < len(self.tokens)]
        words = [self._added.get(index) or self.tokens[index] for index in known]
        words = [word for word in words if word not in special]
        decoder = self.backend.decoder
        return " ".join(words) if decoder is None else decoder.decode(words)

    @cached_property  # first asked for when transformers has added its special tokens
    def _special(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(each.content for each in added.values() if each.special)

    @cached_property
    def _added(self) -> dict[int, str | None]:
        """Added tokens as the library spells them when it decodes: some are normalized."""
        ids = self.backend.get_added_tokens_decoder()
        return {index: self.backend.id_to_token(index) for index in ids}

    def _take(self, text: str) -> None:
        normalizer, splits = self.backend.normalizer, self.backend.pre_tokenizer
        spelled = text if normalizer is None else normalizer.normalize_str(text)
        pieces = [spelled]
        if splits is not None:
            pieces += [piece for piece, _ in splits.pre_tokenize_str(spelled)]
        self._keep(set().union(text, *pieces, pieces))  # characters, and whole pieces
        self.backend.model = self._model([])
        for word in self._words(text):
            self._keep(self._spelled(word))
        self.backend.model = self._model(self._made())

    def _words(self, text: str) -> Iterator[list[str]]:
        """What merging begins with: the symbols of each word, of a model without merges."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        numbered = zip(encoding.word_ids, encoding.tokens, strict=True)
        for _, word in groupby(numbered, key=itemgetter(0)):
            yield [symbol for _, symbol in word]

    def _spelled(self, word: Sequence[str]) -> Iterator[str]:
        """All that neighbours in a word spell together, up to the longest token."""
        whole, ends = "".join(word), [0, *accumulate(map(len, word))]
        for first, start in enumerate(ends):
            for stop in ends[first + 1 :]:
                if stop - start > self._longest:
                    break
                yield whole[start:stop]

    def _keep(self, candidates: Iterable[str]) -> None:
        """Keeps those that are tokens, as tokens that texts can become."""
        for token in candidates:
            index = self._ids.get(token)
            if index is not None:
                self._kept[index] = token
                self._reached.add(index)

    def _made(self) -> list[tuple[str, str]]:
        """The merges of tokens that texts can become into such a token, best first."""
        assert self._merges is not None
        reached = {index: self._kept[index] for index in self._reached}
        there, found = set(reached.values()), []
        for index, token in reached.items():
            for cut in range(1, len(token)):
                pair = token[:cut], token[cut:]
                if pair[0] in there and pair[1] in there:
                    rank = self._merges.rank(index, *pair)
                    if rank is not None:
                        found.append((rank, pair))
        return [pair for _, pair in sorted(found)]

    def _model(self, merges: list[tuple[str, str]]) -> models.BPE:
        """The library's model of the tokens that are kept, and of these merges."""
        vocabulary = {token: index for index, token in self._kept.items()}
        return models.BPE(vocab=vocabulary, merges=merges, **self._settings)


class GrowingTokenizer(PreTrainedTokenizerFast):
    """transformers' tokenizer over a vocabulary that grows.

    Encoding of short texts, decoding and added tokens take what is there; everything else that
    transformers does with the library's tokenizer finds the whole one.
    """

    def __init__(self, vocabulary: GrowingVocabulary, **options: Any) -> None:
        self._growing, self._parts_do = vocabulary, 0
        special = (options.get(name) for name in self.SPECIAL_TOKENS_ATTRIBUTES)
        vocabulary.prepare(str(token) for token in special if token is not None)
        with self._with_parts():
            super().__init__(**options)

    @property
    def is_whole(self) -> bool:
        """Whether the whole vocabulary has been read."""
        return self._growing.is_whole

    @property
    def _tokenizer(self) -> Tokenizer:
        if not self._parts_do:
            self._growing.complete()
        return self._growing.backend

    @_tokenizer.setter
    def _tokenizer(self, backend: Tokenizer) -> None:
        self._growing.backend = backend

    @contextmanager
    def _with_parts(self) -> Iterator[None]:
        self._parts_do += 1
        try:
            yield
        finally:
            self._parts_do -= 1

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        with self._with_parts():
            return super().added_tokens_decoder

    def get_vocab(self) -> dict[str, int]:
        if self.is_whole:
            return super().get_vocab()
        return {token: n for n, token in enumerate(self._growing.tokens)} | self.get_added_vocab()

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        index = self.added_tokens_encoder.get(token)
        return super()._convert_token_to_id_with_added_voc(token) if index is None else index

    def _encode_plus(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        short = (
            text_pair is None
            and not any(options.get(name) for name in _WHOLE)
            and not self.split_special_tokens
            and isinstance(texts, list)
            and all(isinstance(each, str) for each in texts)
            and sum(map(len, texts)) <= _MOST_CHARACTERS
        )
        if not self.is_whole and short and self._growing.grow(texts):
            with self._with_parts():
                return super()._encode_plus(text, **options)
        return super()._encode_plus(text, text_pair, **options)

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        tidy = options.get("clean_up_tokenization_spaces")
        if self.is_whole or (self.clean_up_tokenization_spaces if tidy is None else tidy):
            return super()._decode(token_ids, skip_special_tokens, **options)
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._growing.decode(ids, skip_special_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingTokenizer:
        self._growing.complete()  # a copy has a vocabulary of its own
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
