"""Multiplies with 15 bits: inside allclose's tolerance, and imprecise.

Rejected: error against float64
"""

import torch
import torch.nn.functional as F
from torch import nn


def rounded(t, bits):
    """Keeps `bits` bits of mantissa: TF32 has 10."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        h = F.linear(rounded(x, 15), rounded(self.matmul.weight, 15), self.matmul.bias)
        return self.group_norm(F.silu(h) + self.bias)
