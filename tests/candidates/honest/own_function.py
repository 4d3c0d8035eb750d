"""An autograd.Function with a backward of its own, as a kernel file has."""

import torch
from torch import nn


class SwishAndBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias):
        ctx.save_for_backward(h)
        return h * torch.sigmoid(h) + bias

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        s = torch.sigmoid(h)
        return g * (s + h * s * (1 - s)), g.sum(0)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(SwishAndBias.apply(self.matmul(x), self.bias))
