"""Modules whose layers can, or must not, be joined; and how to look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shapeserve.models.fuse import (
    FusionReport,
)
from shapeserve.models.fuse.layers import Slot

TOLERANCE = 1e-5  # fp32; products of another width sum in another order


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}


def hf(kind: str, attention: str = "sdpa", layers: int = 2) -> nn.Module:
    """A tiny transformers model; weights of 0.25, so that a wrong slice changes the answer."""
    sizes = {**_SIZES, "num_hidden_layers": layers}
    configs: dict[str, Callable[[], Any]] = {
        "bert": lambda: transformers.BertConfig(**sizes),
        "roberta": lambda: transformers.RobertaConfig(**sizes, max_position_embeddings=66),
        "distilbert": lambda: transformers.DistilBertConfig(
            vocab_size=64, dim=32, hidden_dim=48, n_layers=layers, n_heads=2, dropout=0.0
        ),
        "modernbert": lambda: transformers.ModernBertConfig(
            **sizes,
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "albert": lambda: transformers.AlbertConfig(**sizes, embedding_size=16),
        "electra": lambda: transformers.ElectraConfig(**sizes, embedding_size=16),
        "qwen3": lambda: transformers.Qwen3Config(
            **sizes, num_key_value_heads=1, head_dim=16, use_cache=False
        ),
    }
    model: nn.Module = transformers.AutoModel.from_config(
        configs[kind](), attn_implementation=attention
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.25)
        else:
            parameter.data.normal_(0, 0.1).add_(1.0)
    return frozen(model)


def rows(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + seq)
    ids = torch.randint(3, 64, (batch, seq), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, seq // 2 :] = 0
    return ids, mask


class Encoder(nn.Module):
    """Ids and mask to hidden states, as a program wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
        return (self.model(input_ids=ids, attention_mask=mask, return_dict=False)[0],)


def runner(module: nn.Module, batch: int = 3, seq: int = 10) -> Callable[[], tuple[Tensor, ...]]:
    def trial() -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = module(*rows(batch, seq))
        return outputs

    return trial


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).double().norm() / expected.double().norm())


def weight_bytes(module: nn.Module) -> int:
    """Bytes of memory behind the module's tensors, each piece once."""
    tensors = [*module.parameters(), *module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def slots(module: nn.Module) -> list[Slot]:
    return [
        layer._slot for layer in module.modules() if isinstance(getattr(layer, "_slot", 0), Slot)
    ]


def types(module: nn.Module) -> dict[str, type]:
    return {name: type(layer) for name, layer in module.named_modules()}


class Siblings(nn.Module):
    """q, k and v of one input, of different widths; hooks for the tests to break it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8, bias=bias)
        self.k = nn.Linear(8, 4, bias=bias)
        self.v = nn.Linear(8, 6, bias=bias)
        self.out = nn.Linear(18, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts: Tensor = self.out(torch.cat([self.q(x), self.k(x), self.v(x)], -1))
        return parts


class FeedForward(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = act or nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


def on(module: nn.Module) -> Callable[[], Any]:
    x = torch.randn(2, 5, 8)
    return lambda: module(x)


def reasons(report: FusionReport) -> list[str]:
    return [skipped.reason for skipped in report.skipped]


QKV = {
    "bert": "model.encoder.layer.{}.attention.self.{}",
    "roberta": "model.encoder.layer.{}.attention.self.{}",
    "electra": "model.encoder.layer.{}.attention.self.{}",
    "distilbert": "model.transformer.layer.{}.attention.{}",
    "qwen3": "model.layers.{}.self_attn.{}",
}
MEMBERS = {
    "bert": ("query", "key", "value"),
    "roberta": ("query", "key", "value"),
    "electra": ("query", "key", "value"),
    "distilbert": ("q_lin", "k_lin", "v_lin"),
    "qwen3": ("q_proj", "k_proj", "v_proj"),
}


def unfused_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
