"""A convolutional encoder of waves and a low-rank adapter."""

import torch
from torch import nn


class Block(nn.Module):
    """One layer of the encoder."""

    def __init__(self, inputs, outputs, stride, slope):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 2 * stride + 1, stride=stride, padding=stride)
        self.norm = nn.BatchNorm1d(outputs)
        self.slope = slope
        self.residual = False

    def forward(self, values):
        """Map (batch, inputs, time) to (batch, outputs, time)."""
        out = self.norm(self.conv(values))
        out = nn.functional.leaky_relu(out, self.slope)
        if self.residual:
            out = out + out.mean(dim=1, keepdim=True)
        return out


class Encoder(nn.Module):
    """A stack of blocks; gives the hidden states of one of them."""

    strides = (5, 4, 4)

    def __init__(self, dim=16, layers=3, layer=2, slope=0.1):
        super().__init__()
        sizes = [1] + [dim] * layers
        self.blocks = nn.ModuleList(
            Block(sizes[at], sizes[at + 1], self.strides[at], slope) for at in range(layers)
        )
        self.head = nn.Linear(dim, 40)
        self.drop = nn.Dropout(0.1)
        self.layer = layer
        self.register_buffer("positions", positional(dim), persistent=False)
        self.register_buffer("shift", torch.zeros(dim))

    def forward(self, wavs):
        """Map (batch, samples) to (batch, frames, dim)."""
        hidden = wavs[:, None]
        for block in self.blocks[: self.layer + 1]:
            hidden = block(hidden)
        hidden = self.drop(hidden.transpose(1, 2))
        return hidden + 0.1 * self.positions + self.shift

    def logits(self, hidden):
        """Logits, in pretraining only."""
        return self.head(hidden)


def positional(dim):
    """One vector added to all frames."""
    return torch.sin(torch.arange(dim) / 3.0)


class Adapter(nn.Module):
    """A small residual."""

    def __init__(self, dim, rank, scale=0.5):
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)
        self.scale = scale
        self.activation = nn.ReLU()

    def forward(self, values):
        """Map (frames, dim) to (frames, dim)."""
        return values + self.scale * self.up(self.activation(self.down(values)))
