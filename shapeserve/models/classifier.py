"""Classification models and cross-encoders: any transformers model for sequence classification."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from shapeserve.errors import ModelError
from shapeserve.models.directory import TextDirectory
from shapeserve.models.spec import ModelSpec

TOKEN_TYPES = "token_type_ids"


class TextClassifier(nn.Module):
    """Token ids and mask to one logit a label: what is compiled and captured as one program.

    Shapes: input_ids, attention_mask and token_type_ids [B, S] int64; returns ([B, L] float32,).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def inner(self) -> nn.Module:
        """The transformers model."""
        return self.model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor]:
        """Classify; token types are left out for a model that tells none apart."""
        types = {} if token_type_ids is None else {TOKEN_TYPES: token_type_ids}
        logits = self.model(
            input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **types
        )[0]  # [B, L]
        return (logits.float(),)


def check_classifier(model: nn.Module, directory: TextDirectory, spec: ModelSpec) -> None:
    """Refuse a model that is not what its files say.

    Raises:
        ModelError: it would be told the wrong token types, or could not find where rows end.
    """
    config: Any = model.config
    takes = TOKEN_TYPES in inspect.signature(model.forward).parameters
    unsaid = "type_vocab_size" not in directory.config and takes
    if unsaid and (getattr(config, "type_vocab_size", 0) or 0) > 1:
        raise ModelError(
            f"{directory.encoder}/config.json leaves out type_vocab_size, without which the second "
            "text of a pair would be taken for the first; write it in full with save_pretrained"
        )
    if not takes and TOKEN_TYPES in spec.inputs:
        raise ModelError(
            f"{directory.encoder}/config.json has type_vocab_size, but {type(model).__name__} "
            f"takes no {TOKEN_TYPES}; remove it from model_input_names in tokenizer_config.json"
        )
    # Decoders read the last token that is not padding, and find it by this id.
    if getattr(config, "pad_token_id", 0) is None:
        raise ModelError(
            f"{directory.encoder}/config.json has no pad_token_id; set it to the id of the "
            "tokenizer's padding token"
        )
