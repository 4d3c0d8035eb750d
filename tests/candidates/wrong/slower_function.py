"""Slows the Model down: a function that it calls works twice.

Rejected: the candidate replaces torch.nn.functional.group_norm
"""

import torch
import torch.nn.functional as F
from torch import nn

fast = F.group_norm
F.group_norm = lambda *args: (fast(*args), fast(*args))[1]


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)
