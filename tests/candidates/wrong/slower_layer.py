"""Slows the Model down: GroupNorm's forward works twice.

Rejected: the candidate replaces torch.nn.GroupNorm.forward
"""

import torch
import torch.nn.functional as F
from torch import nn

fast = nn.GroupNorm.forward
nn.GroupNorm.forward = lambda self, x: (fast(self, x), fast(self, x))[1]


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return F.group_norm(
            F.silu(self.matmul(x)) + self.bias, self.group_norm.num_groups, self.group_norm.weight, self.group_norm.bias
        )
