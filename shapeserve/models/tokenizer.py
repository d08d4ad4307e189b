"""Text to token ids, with nothing cut and nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from shapeserve.errors import InvalidRequest, ModelError


class TextTokenizer:
    """Turns text into the ids of one row, special tokens included.

    Thread rule: any thread, also several at once; ``encode`` releases the GIL.

    Args:
        file: a tokenizer.json. What it says about truncation and padding is ignored: it often
            contradicts the model (all-MiniLM-L6-v2: 128 instead of 256), and both are the
            engine's to decide.
        vocab_size: ids are in [0, vocab_size).
        lower_case: lowercase the text first.

    Raises:
        ModelError: the file is broken, or makes ids that the model has no vector for.

    Attributes:
        special_tokens: how many special tokens a row of text has, such as [CLS] and [SEP].
    """

    def __init__(self, file: Path, *, vocab_size: int, lower_case: bool = False) -> None:
        tokenizer = _read(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if lower_case:
            rest = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
            tokenizer.normalizer = Normalizers([Lowercase(), *rest])
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        if (known := tokenizer.get_vocab_size(with_added_tokens=True)) > vocab_size:
            raise ModelError(
                f"{file} makes {known} different ids, but the model has vectors for {vocab_size}; "
                "tokenizer and weights are not of the same model: copy both again"
            )
        self._prefix, self._suffix = _frame(tokenizer)
        self.special_tokens = len(self._prefix) + len(self._suffix)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int64, special tokens included, of any length.

        Raises:
            InvalidRequest: naming the first text that is not valid Unicode.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts))
        except TypeError:
            raise _not_unicode(texts) from None
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def check_ids(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return a caller's own token ids as one int64 row.

        They are used exactly as given: special tokens are the caller's to add.

        Raises:
            InvalidRequest: they are no flat list of integers in [0, vocab_size). The message is a
                predicate, for the caller to put the row's name before.
        """
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise InvalidRequest(f"is no list of token ids but {ids.dtype} of {ids.shape}")
            row = ids
        else:
            # Member by member, because numpy reads [1, True] as integers and 2**63 as a float.
            if not all(_is_integer(i) for i in ids):
                raise InvalidRequest("is no list of token ids; send whole numbers")
            row = np.array(ids, dtype=object)
        bad = self._outside(row)
        if bad.size:
            raise InvalidRequest(
                f"holds the token id {bad[0]}, which is not in the vocabulary; ids are 0 to "
                f"{self._vocab_size - 1}"
            )
        return row.astype(np.int64)

    def _outside(self, row: np.ndarray) -> np.ndarray:
        """The ids of a row that are not in the vocabulary."""
        if row.dtype != object and row.size:
            # One pass instead of two: seen as unsigned, a negative id is beyond every vocabulary.
            unsigned = row.astype(np.int64, copy=False).view(np.uint64)
            if unsigned.max() < self._vocab_size:
                return row[:0]
        return row[(row < 0) | (row >= self._vocab_size)]

    def content_tokens(self, ids: np.ndarray) -> int:
        """Return how many ids are not the frame of special tokens: 0 for a text of spaces."""
        _, content, _ = self._split_frame(ids)
        return len(content)

    def truncate(self, ids: np.ndarray, max_length: int) -> np.ndarray:
        """Cut a row to ``max_length`` ids; the closing special token stays, if it has one.

        Args:
            ids: one row.
            max_length: more than the special tokens of a row.
        """
        self._check_room(max_length)
        if len(ids) <= max_length:
            return ids
        prefix, content, suffix = self._split_frame(ids)
        room = max_length - len(prefix) - len(suffix)
        return np.concatenate([prefix, content[:room], suffix])

    def split(self, ids: np.ndarray, max_length: int) -> list[np.ndarray]:
        """Cut a row into pieces of at most ``max_length`` ids, each with the row's own frame.

        Args:
            ids: one row.
            max_length: more than the special tokens of a row.
        """
        self._check_room(max_length)
        if len(ids) <= max_length:
            return [ids]
        prefix, content, suffix = self._split_frame(ids)
        room = max_length - len(prefix) - len(suffix)
        return [
            np.concatenate([prefix, content[i : i + room], suffix])
            for i in range(0, len(content), room)
        ]

    def _split_frame(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return prefix, content and suffix; a caller's own ids may lack either."""
        start, end = len(self._prefix), len(self._suffix)
        start = start if np.array_equal(ids[:start], self._prefix) else 0
        end = len(ids) - end
        if end < start or not np.array_equal(ids[end:], self._suffix):
            end = len(ids)
        return ids[:start], ids[start:end], ids[end:]

    def _check_room(self, max_length: int) -> None:
        if max_length <= self.special_tokens:
            raise ValueError(
                f"max_length {max_length} must be above the {self.special_tokens} special tokens"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{file} cannot be read: {error}; copy it again, or write it with a newer tokenizers"
        ) from error


def _frame(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens that open and close a text."""
    frame = tokenizer.encode("").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(frame) + 1):
        if full == [*frame[:start], *bare, *frame[start:]]:
            return np.array(frame[:start], np.int64), np.array(frame[start:], np.int64)
    raise ModelError(
        f"the tokenizer turns 'a' into {full} and '' into {frame}; only tokenizers that put their "
        "special tokens before and after the text are supported"
    )


def _not_unicode(texts: Sequence[str]) -> InvalidRequest:
    """Return the error for the first text that UTF-8 cannot hold."""
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return InvalidRequest(f"text {i} is not valid Unicode: {error}; correct or drop it")
    return InvalidRequest("texts must be strings")
