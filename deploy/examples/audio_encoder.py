"""An audio encoder that ignores padding: mel frames to a vector, and to a vector every 40 ms.

The weights are random (a fixed seed, so that every process has the same ones): what it shows is how
lengths are served, not what was said. Replace ``build`` by your own factory.

What makes it padding-invariant: frames beyond the end are set to zero before each convolution,
attention has a mask, and the mean is taken over real frames only. Layer normalisation looks at one
frame at a time; group normalisation over time, as in wav2vec 2.0 base, would see the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

MELS, WIDTH, HEADS, LAYERS = 80, 128, 4, 2


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Take and return frames [B, T, WIDTH]; ``real`` is [B, T], true on real ones."""
        parts = self.qkv(self.norm_1(hidden)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))


class AudioEncoder(nn.Module):
    """Two convolutions that halve the frame rate, two layers of attention, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(MELS, WIDTH, 3, stride=2, padding=1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return ``embedding`` [B, WIDTH] of length 1 and ``states`` [B, ceil(T/4), WIDTH].

        Args:
            features: [B, T, MELS].
            mask: [B, T], 1 on the recording and 0 on the padding.
        """
        hidden, real = features.transpose(1, 2), mask[:, None].to(features.dtype)
        for conv in (self.first, self.second):
            # Output frame i reads the frames 2i-1 to 2i+1, so it is real where frame 2i is.
            hidden, real = functional.gelu(conv(hidden * real)), real[:, :, ::2]
        hidden, real = hidden.transpose(1, 2), real[:, 0]
        hidden = hidden + _positions(hidden)
        for layer in self.layers:
            hidden = layer(hidden, real.bool())
        states = self.norm(hidden)
        mean = (states * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
        return {"embedding": functional.normalize(mean, dim=-1), "states": states}


def _positions(hidden: Tensor) -> Tensor:
    """Sines and cosines of the frame's number, in WIDTH frequencies."""
    number = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
    frequency = torch.logspace(0, -4, WIDTH // 2, device=hidden.device)
    angle = number[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(hidden.dtype)


def build() -> nn.Module:
    """Make the encoder; its weights are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AudioEncoder()
