"""The model of the hand-written arms: all-MiniLM-L6-v2 as its own configuration describes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BatchEncoding

from benchmarks.environment import cores, model_dir

MAX_TOKENS = 256  # sentence_bert_config.json; tokenizer.json says 128 and must be overruled
BATCH_ROWS = 32


class SentenceModel(torch.nn.Module):
    """The transformer with mean pooling and normalisation."""

    def __init__(self, directory: Path, attention: str = "sdpa") -> None:
        super().__init__()
        self.transformer = AutoModel.from_pretrained(directory, attn_implementation=attention)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # input_ids, attention_mask: [B, S] int64 -> [B, 384] float32
        hidden = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


class Encoder:
    """Texts to vectors the usual way: tokenise, pad to the longest text of the batch, run."""

    def __init__(self, *, compiled: bool = False) -> None:
        torch.set_num_threads(cores())  # Ray sets OMP_NUM_THREADS to 1 by default
        directory = model_dir()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = SentenceModel(directory).eval()
        self._forward: Callable[..., torch.Tensor] = self.model
        if compiled:
            self._forward = torch.compile(self.model, dynamic=True)

    def tokenize(self, texts: list[str]) -> BatchEncoding:
        """Return input_ids and attention_mask, padded to the longest text."""
        batch: BatchEncoding = self.tokenizer(
            texts,
            padding="longest",
            truncation=True,
            max_length=MAX_TOKENS,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        return batch

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> tuple[list[list[float]], list[int]]:
        """Return one vector and one token count per text."""
        batch = self.tokenize(texts)
        vectors = self._forward(batch["input_ids"], batch["attention_mask"])
        return vectors.tolist(), batch["attention_mask"].sum(1).tolist()
