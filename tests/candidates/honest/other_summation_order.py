"""Sums in another order: the product in four parts, the moments by hand."""

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
        parts = zip(x.chunk(4, 1), self.matmul.weight.chunk(4, 1))
        h = sum(part @ weight.t() for part, weight in parts) + self.matmul.bias
        h = (F.silu(h) + self.bias).unflatten(1, (self.group_norm.num_groups, -1))
        centred = h - h.mean(2, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(2, keepdim=True) + self.group_norm.eps)
        return normed.flatten(1) * self.group_norm.weight + self.group_norm.bias
