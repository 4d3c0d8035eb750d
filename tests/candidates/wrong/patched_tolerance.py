"""Widens the judge's tolerance.

Rejected: the candidate replaces judge.compare.TOLERANCE
"""

import torch
import torch.nn.functional as F
from torch import nn

import judge.compare

judge.compare.TOLERANCE[torch.float32] = {"highest": 1e9, "high": 1e9}


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)
