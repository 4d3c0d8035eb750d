"""Has an imprecise gradient.

Rejected: error against float64
"""

import torch
import torch.nn.functional as F
from torch import nn


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + 1e-5 * torch.cos(1e3 * g))


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def right(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)

    def forward(self, x):
        return Rounded.apply(self.right(x))
