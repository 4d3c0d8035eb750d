"""A linear layer, Swish, one more bias, group normalisation: KernelBench level 2, problem 37.

    h = x W^T + b;    h = sigmoid(h) * h;    h = h + bias;    out = GroupNorm(h) with weight and bias

Swish comes before the extra bias. The norm runs over the out_features / num_groups contiguous features of each group of
each row.

Shapes: x (B, in_features), bias broadcastable to (B, out_features), out (B, out_features).
Work at the benchmark shapes: 0.69 GB (x, W and the vectors read once, out written once), 274.9 GFLOP in the matrix
product.
"""

import torch
from torch import nn

batch_size = 32768
in_features = 1024
out_features = 4096
num_groups = 64
bias_shape = (out_features,)

on_cpu = dict(batch_size=512)  # the harness's sizes on a CPU

# Other shapes, for the harness's --sweep: one row to many, short and long products.
sweep = [
    dict(batch_size=batch, in_features=ins, out_features=outs, num_groups=outs // 64, bias_shape=(outs,))
    for batch, ins, outs in (
        (1, 1024, 4096), (4, 8192, 8192), (16, 1024, 4096), (64, 4096, 4096), (128, 8192, 8192), (256, 1024, 4096),
        (256, 8192, 2048), (512, 64, 8192), (700, 2048, 1024), (1024, 2048, 2048),
        (1024, 8192, 8192), (2048, 512, 512), (4096, 4096, 4096),
        (4096, 1024, 16384), (8192, 256, 1024), (16384, 1000, 1024), (32768, 1024, 4096), (65536, 128, 64),
        (65536, 16384, 1024),
    )
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, num_groups: int, bias_shape: tuple):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.matmul(x)
        h = torch.sigmoid(h) * h
        h = h + self.bias
        return self.group_norm(h)


def get_inputs(batch_size: int = batch_size):
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, num_groups, bias_shape]
