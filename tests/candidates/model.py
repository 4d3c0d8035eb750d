"""The small Model that the candidates beside it stand in for: Linear, Swish, bias, GroupNorm."""

import torch
from torch import nn

batch_size = 32


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        h = self.matmul(x)
        h = torch.sigmoid(h) * h
        h = h + self.bias
        return self.group_norm(h)


def get_inputs(batch_size=batch_size):
    return [torch.rand(batch_size, 96)]


def get_init_inputs():
    return [96, 64, 8]
