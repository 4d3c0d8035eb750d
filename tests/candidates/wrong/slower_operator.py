"""Slows the Model down: an ATen operator is overridden through the dispatcher.

Rejected: the candidate replaces the operator aten::sigmoid
"""

import torch
import torch.nn.functional as F
from torch import library, nn

aten = library.Library("aten", "IMPL")
for key in ("CPU", "CUDA"):
    aten.impl("sigmoid", lambda x: 1 / (1 + torch.exp(-x)), key)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)
