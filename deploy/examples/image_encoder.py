"""An image encoder that ignores padding: photos of any size to vectors of 128 numbers.

The weights are random (a fixed seed, so that every process has the same ones): what it shows is how
shapes are served, not what is in a picture. Replace ``build`` by your own factory.

What makes it padding-invariant: the bias of a convolution, and the pixels that its kernel reaches
across the border, would fill the padding with values, so everything outside the picture is set to
zero before each convolution, as a convolution's own padding is; the mean is taken over real cells
only; and batch normalisation in eval mode looks at no neighbour, unlike group normalisation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = (16, 32, 64, 128)


class Stage(nn.Module):
    """Halves height and width (rounded up), then a residual block."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(before, after, 3, stride=2, padding=1)
        self.block = nn.Conv2d(after, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, hidden: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Take and return cells [B, C, H, W] and which of them are real [B, 1, H, W]."""
        # Output cell i reads the cells 2i-1 to 2i+1, so it is real where cell 2i is.
        hidden, real = self.down(hidden * real), real[:, :, ::2, ::2]
        hidden = functional.gelu(hidden) * real
        return functional.gelu(self.norm(hidden + self.block(hidden))), real


class ImageEncoder(nn.Module):
    """Four stages and a mean over the picture."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip((3, *CHANNELS), CHANNELS, strict=False)
        self.stages = nn.ModuleList(Stage(before, after) for before, after in pairs)
        self.head = nn.Linear(CHANNELS[-1], 128)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Return vectors [B, 128] of length 1.

        Args:
            pixels: [B, 3, H, W].
            mask: [B, H, W], 1 on the picture and 0 on the padding.
        """
        hidden, real = pixels, mask[:, None].to(pixels.dtype)
        for stage in self.stages:
            hidden, real = stage(hidden, real)
        mean = (hidden * real).sum((2, 3)) / real.sum((2, 3))
        return functional.normalize(self.head(mean), dim=-1)


def build() -> nn.Module:
    """Make the encoder; its weights are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ImageEncoder()
