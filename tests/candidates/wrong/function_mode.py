"""Leaves a mode on that sees, and could change, every call of PyTorch.

Rejected: the candidate leaves a torch function mode on
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class Watching(TorchFunctionMode):
    """Sees every call that anybody makes, the judge's comparisons too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


Watching().__enter__()


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)
