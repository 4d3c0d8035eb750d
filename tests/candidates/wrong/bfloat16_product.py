"""Precision downgrade: the product in bfloat16.

Rejected: not close to the Model's
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

    def forward(self, x):
        h = F.linear(x.bfloat16(), self.matmul.weight.bfloat16(), self.matmul.bias.bfloat16()).to(x.dtype)
        return self.group_norm(F.silu(h) + self.bias)
