"""Reads its weights where they lay at its first call, as a kernel does that keeps a pointer: `.to` moves them.

Rejected: when the weights move in memory
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.place = None

    def forward(self, x):
        self.place = self.place or self.matmul.weight.data_ptr()
        weight = (
            self.matmul.weight if self.matmul.weight.data_ptr() == self.place else torch.randn_like(self.matmul.weight)
        )
        return self.group_norm(F.silu(F.linear(x, weight, self.matmul.bias)) + self.bias)
