"""Owns the demo's network: a small transformer that predicts the next byte of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn


@dataclass(frozen=True)
class Config:
    """The size of the network; `width` is divided among `heads`."""

    vocabulary: int = 256
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 3
    dropout: float = 0.1


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, width) to the same shape; a position sees only itself and those before it."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, width)))
        return x.add(self.dropout(self.down(F.gelu(self.up(self.norm2(x))))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out; the output matrix is the embedding (tied), times a learned scale."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        # One number (0-d): it also makes the count of parameters odd, so that the flat buffer needs padding.
        self.scale = nn.Parameter(torch.ones(()))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 (rows, length) to logits (rows, length, vocabulary)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x)) * self.scale
        return logits
