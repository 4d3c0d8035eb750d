"""Is right on the first call only.

Rejected: output (a second call on the same inputs, seed 0): 2048 of 2048
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
        self.calls = 0

    def right(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)

    def forward(self, x):
        self.calls += 1
        return self.right(x) + (1.0 if self.calls > 1 else 0.0)
