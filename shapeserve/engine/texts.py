"""From texts and pairs of texts to rows of tokens, and what is cut off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shapeserve.dispatch import ASK_TO_CUT, Dispatcher
from shapeserve.errors import InvalidRequest
from shapeserve.layout import RowArrays
from shapeserve.models.spec import ModelSpec, TextPair

if TYPE_CHECKING:  # needs the extra ``hf``, which a service of other models may lack
    from shapeserve.models.tokenizer import Encoded, TextTokenizer

# Of a text with more characters for each token that the model takes, only the beginning is read if
# the rest is cut off anyway; else it is refused unread: tokenising 16 MB to say that it is too long
# would keep others waiting. Words have 4 or 5. Arbitrary above.
_CHARACTERS_PER_TOKEN = 128
_SEQ = "seq"
_TYPES = "token_type_ids"

# What of a pair an error is about, as its ``param``.
FIRST, SECOND = "text", "text_pair"


@dataclass(frozen=True, slots=True)
class TextRow(RowArrays):
    """A row of tokens of which only the part ``content`` may be cut."""

    content: tuple[int, int]


class Texts:
    """Makes rows of texts for one text model.

    Thread rule: any thread, also several at once.

    Args:
        tokenizer: of the model.
        spec: of the model.
        dispatcher: says what becomes of long rows.
    """

    def __init__(self, tokenizer: TextTokenizer, spec: ModelSpec, dispatcher: Dispatcher) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._dispatcher = dispatcher
        self._limit = spec.hard_limit[_SEQ]
        self._classifies = spec.task == "classify"

    def rows(
        self, samples: Sequence[str | TextPair], over_max: str | None
    ) -> list[RowArrays | InvalidRequest]:
        """Tokenise samples together; the error of a bad one stands in its place."""
        found: dict[int, RowArrays | InvalidRequest] = {}
        read: dict[int, str | TextPair] = {}
        for i, sample in enumerate(samples):
            try:
                read[i] = self._read(sample, over_max)
            except InvalidRequest as error:
                found[i] = error
        pairs = {i: sample for i, sample in read.items() if isinstance(sample, TextPair)}
        if pairs:
            found |= self._long_first_texts(pairs)
        left = [i for i in read if i not in found]
        if left and self._classifies:
            found |= zip(left, self._classified([read[i] for i in left]), strict=True)
        elif left:
            texts = [text for i in left if isinstance(text := read[i], str)]
            found |= zip(left, self._embedded(texts), strict=True)
        return [found[i] for i in range(len(samples))]

    def of_ids(self, ids: Sequence[int] | np.ndarray) -> RowArrays:
        """Return a caller's own token ids as one row, of token type 0 as those of one text.

        Raises:
            InvalidRequest: they are no token ids, or none at all.
        """
        row = self._tokenizer.check_ids(ids)
        if not row.size:
            raise InvalidRequest("holds no token id; send at least one")
        return RowArrays(self._arrays(row, np.zeros_like(row)), {_SEQ: len(row)})

    def check_ids(self, ids: np.ndarray) -> None:
        """Refuse ids that are not in the vocabulary."""
        self._tokenizer.check_ids(ids)

    def cut(self, row: RowArrays, length: int) -> RowArrays:
        """Cut a row to ``length`` tokens; special tokens and a pair's first text stay.

        Raises:
            InvalidRequest: there is no room for anything of a pair's second text.
        """
        ids = row.arrays["input_ids"]
        start, end = row.content if isinstance(row, TextRow) else self._tokenizer.content(ids)
        fixed = len(ids) - (end - start)
        if fixed >= length:  # never of one text: more than its special tokens always fit
            raise self._long_first(fixed - self._tokenizer.pair_special_tokens, length)
        cut = self._tokenizer.truncate
        arrays = {name: cut(array, length, (start, end)) for name, array in row.arrays.items()}
        return RowArrays(arrays, {_SEQ: length})

    def pieces(self, row: RowArrays, length: int) -> list[RowArrays]:
        """Cut a text of an encoder into pieces of at most ``length`` tokens."""
        parts = self._tokenizer.split(row.arrays["input_ids"], length)
        return [RowArrays({"input_ids": part}, {_SEQ: len(part)}) for part in parts]

    # --- not read -----------------------------------------------------------------------------

    def _read(self, sample: str | TextPair, over_max: str | None) -> str | TextPair:
        """Return what of a sample is to be tokenised.

        Raises:
            InvalidRequest: it need not be tokenised to know that it will not run.
        """
        if isinstance(sample, str):
            return self._begun(sample, over_max)
        if not self._classifies:
            raise InvalidRequest(
                f"is a pair of texts, but {self._spec.name} reads one text at a time; send strings"
            )
        first = self._begun(sample.text, "reject", FIRST)
        return TextPair(first, self._begun(sample.text_pair, over_max, SECOND))

    def _begun(self, text: str, over_max: str | None, part: str | None = None) -> str:
        """Return a text, or of a very long one the beginning if the rest is cut off anyway."""
        most = _CHARACTERS_PER_TOKEN * self._limit
        if len(text) <= most:
            return text
        route = self._dispatcher.route({_SEQ: self._limit + 1}, over_max=over_max)
        if route.action != "reject":  # pieces need all of it
            return self._tokenizer.beginning(text, route.keep[_SEQ]) if route.keep else text
        remedy = "" if part == FIRST else f" or {ASK_TO_CUT}"
        raise InvalidRequest(
            f"has {len(text)} characters, at most {most} are read for a model of {self._limit} "
            f"tokens; shorten it{remedy}",
            code="too_long",
            param=part,
        )

    def _long_first_texts(self, pairs: Mapping[int, TextPair]) -> dict[int, InvalidRequest]:
        """Refuse pairs whose first text fills the model, before it is joined to each second one.

        A query has hundreds of documents: it is read once here, and only if it is short enough
        once more with each of them.
        """
        texts = [*dict.fromkeys(pair.text for pair in pairs.values())]
        try:
            counts = dict(zip(texts, self._tokenizer.count_tokens(texts), strict=True))
        except InvalidRequest:  # not valid Unicode, which each pair is told when it is encoded
            return {}
        most = self._limit - self._tokenizer.pair_special_tokens - 1
        return {
            i: self._long_first(counts[pair.text], self._limit)
            for i, pair in pairs.items()
            if counts[pair.text] > most
        }

    def _long_first(self, tokens: int, limit: int) -> InvalidRequest:
        most = max(limit - self._tokenizer.pair_special_tokens - 1, 0)
        return InvalidRequest(
            f"has {tokens} tokens, at most {most} leave room for a second text within {limit}; "
            "shorten it, because only the second text of a pair is ever cut",
            code="too_long",
            param=FIRST,
        )

    # --- tokens -------------------------------------------------------------------------------

    def _embedded(self, texts: Sequence[str]) -> list[RowArrays | InvalidRequest]:
        """Tokenise texts together; if one of them cannot be, each alone, so that only it fails."""
        try:
            encoded = self._tokenizer.encode(texts)
        except InvalidRequest as error:
            return [error] if len(texts) == 1 else [self._embedded([text])[0] for text in texts]
        return [
            RowArrays({"input_ids": ids}, {_SEQ: len(ids)})
            if self._tokenizer.content_tokens(ids)
            else _empty(None)
            for ids in encoded
        ]

    def _classified(self, rows: Sequence[str | TextPair]) -> list[RowArrays | InvalidRequest]:
        """As :meth:`_embedded`, for texts and pairs of a classification model."""
        try:
            encoded = self._tokenizer.encode_rows(rows)
        except InvalidRequest as error:
            return [error] if len(rows) == 1 else [self._classified([row])[0] for row in rows]
        return [self._checked(row) for row in encoded]

    def _checked(self, row: Encoded) -> RowArrays | InvalidRequest:
        first, second = row.text, row.text_pair
        if first[0] == first[1]:
            return _empty(None if second is None else FIRST)
        if second is not None and second[0] == second[1]:
            return _empty(SECOND)
        return TextRow(self._arrays(row.ids, row.types), {_SEQ: len(row.ids)}, row.content)

    def _arrays(self, ids: np.ndarray, types: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": ids} | ({_TYPES: types} if _TYPES in self._spec.inputs else {})


def _empty(part: str | None) -> InvalidRequest:
    return InvalidRequest(
        "is empty or holds no token of the model (white space only); send text or drop the item",
        code="empty_input",
        param=part,
    )
