"""The backward pass overwrites the gradient that comes in, which others may want too.

Rejected: writes the gradient that comes in
"""

import torch
import torch.nn.functional as F
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        result = gradient.clone()
        gradient.zero_()
        return result


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def right(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)

    def forward(self, x):
        return Function.apply(self.right(x))
