"""Text to token ids, with nothing cut and nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from shapeserve.errors import InvalidRequest, ModelError
from shapeserve.models.spec import TextPair

# Words have 4 or 5 characters a token, so that the first look nearly always is the last one.
_FIRST_CHARACTERS_PER_TOKEN = 8
# A text of spaces alone is then read at most 4 / 3 times, beside the last time.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text or pair as a classification model reads it.

    Attributes:
        ids: int64, special tokens included, of any length.
        types: the token type of each id, int64.
        text: where the ids of the text, or of a pair's first text, begin and end.
        text_pair: where those of a pair's second text do; None for a text alone.
    """

    ids: np.ndarray
    types: np.ndarray
    text: tuple[int, int]
    text_pair: tuple[int, int] | None

    @property
    def content(self) -> tuple[int, int]:
        """Where the part begins and ends that may be cut."""
        return self.text if self.text_pair is None else self.text_pair


class TextTokenizer:
    """Turns text into the ids of one row, special tokens included.

    Thread rule: any thread, also several at once; ``encode`` releases the GIL.

    Args:
        file: a tokenizer.json. What it says about truncation and padding is ignored: it often
            contradicts the model (all-MiniLM-L6-v2: 128 instead of 256), and both are the
            engine's to decide.
        vocab_size: ids are in [0, vocab_size).
        lower_case: lowercase the text first.
        type_vocab_size: token types are in [0, type_vocab_size); 0 for a model without them.

    Raises:
        ModelError: the file is broken, or makes ids or token types that the model has no vector
            for.

    Attributes:
        special_tokens: how many special tokens a row of text has, such as [CLS] and [SEP].
        pair_special_tokens: how many a row of two texts has.
    """

    def __init__(
        self, file: Path, *, vocab_size: int, lower_case: bool = False, type_vocab_size: int = 0
    ) -> None:
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
        self.pair_special_tokens = int(tokenizer.num_special_tokens_to_add(is_pair=True))
        added = tokenizer.get_added_tokens_decoder().values()
        self._longest_added = max((len(token.content) for token in added), default=0)
        if type_vocab_size:
            _check_types(tokenizer, file, type_vocab_size)

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

    def encode_rows(self, rows: Sequence[str | TextPair]) -> list[Encoded]:
        """Return each text or pair of texts as the tokenizer's own template joins it.

        Raises:
            InvalidRequest: naming the first text that is not valid Unicode, both of a pair counted.
        """
        inputs = [row if isinstance(row, str) else (row.text, row.text_pair) for row in rows]
        try:
            encodings = self._tokenizer.encode_batch_fast(inputs)
        except TypeError:
            texts = [text for row in inputs for text in ([row] if isinstance(row, str) else row)]
            raise _not_unicode(texts) from None
        encoded = []
        for row, encoding in zip(rows, encodings, strict=True):
            sequences = encoding.sequence_ids
            encoded.append(
                Encoded(
                    np.array(encoding.ids, dtype=np.int64),
                    np.array(encoding.type_ids, dtype=np.int64),
                    _range(sequences, 0),
                    None if isinstance(row, str) else _range(sequences, 1),
                )
            )
        return encoded

    def beginning(self, text: str, tokens: int) -> str:
        """Return what of a long text makes its first ``tokens`` ids, and more than those.

        Only so much of the text is looked at as that takes. It is all of the text if that has no
        more ids, or if the tokenizer does not tell words apart.
        """
        size = _FIRST_CHARACTERS_PER_TOKEN * tokens
        while size < len(text):
            try:
                words = self._tokenizer.encode(text[:size], add_special_tokens=False).word_ids
            except TypeError:  # not valid Unicode, which whoever encodes it is told
                break
            # The last word may go on behind the cut. So may an added token such as [MASK], whose
            # characters may be words while it is not whole.
            last = (words[-1] or 0) - self._longest_added if words else 0
            if sum(word is not None and word < last for word in words) > tokens:
                return text[:size]
            size *= _GROWTH
        return text

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each text has without special tokens.

        Raises:
            InvalidRequest: naming the first text that is not valid Unicode.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise _not_unicode(texts) from None
        return [len(encoding.ids) for encoding in encodings]

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
        start, end = self.content(ids)
        return end - start

    def truncate(
        self, row: np.ndarray, max_length: int, content: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Cut a row to ``max_length`` elements; the closing special token stays, if it has one.

        Args:
            row: ids, or with ``content`` anything that has one element for each.
            max_length: more than what is not content.
            content: where the part begins and ends that is cut; None: all but special tokens.
        """
        self._check_room(max_length)
        _, end = self.content(row) if content is None else content
        excess = max(len(row) - max_length, 0)
        return np.concatenate([row[: end - excess], row[end:]])

    def split(self, ids: np.ndarray, max_length: int) -> list[np.ndarray]:
        """Cut a row into pieces of at most ``max_length`` ids, each with the row's own frame.

        Args:
            ids: one row.
            max_length: more than the special tokens of a row.
        """
        self._check_room(max_length)
        if len(ids) <= max_length:
            return [ids]
        start, end = self.content(ids)
        prefix, content, suffix = ids[:start], ids[start:end], ids[end:]
        room = max_length - len(prefix) - len(suffix)
        return [
            np.concatenate([prefix, content[i : i + room], suffix])
            for i in range(0, len(content), room)
        ]

    def content(self, ids: np.ndarray) -> tuple[int, int]:
        """Return where the frame of special tokens ends and begins; own ids may lack either."""
        start, end = len(self._prefix), len(self._suffix)
        start = start if np.array_equal(ids[:start], self._prefix) else 0
        end = len(ids) - end
        if end < start or not np.array_equal(ids[end:], self._suffix):
            end = len(ids)
        return start, end

    def _check_room(self, max_length: int) -> None:
        if max_length <= self.special_tokens:
            raise ValueError(
                f"max_length {max_length} must be above the {self.special_tokens} special tokens"
            )


def _range(sequences: Sequence[int | None], number: int) -> tuple[int, int]:
    """Where the ids of one text of a row begin and end; it may have none."""
    if number not in sequences:
        return 0, 0
    return sequences.index(number), len(sequences) - sequences[::-1].index(number)


def _check_types(tokenizer: Tokenizer, file: Path, type_vocab_size: int) -> None:
    made = {*tokenizer.encode("a").type_ids, *tokenizer.encode("a", "a").type_ids}
    if max(made) >= type_vocab_size:
        raise ModelError(
            f"{file} makes the token type {max(made)}, but the model has vectors for "
            f"{type_vocab_size}; tokenizer and weights are not of the same model: copy both again"
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
