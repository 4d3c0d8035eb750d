"""A linear layer, a norm over each row, a sum and a product: KernelBench level 2, problem 28.

    h = x W^T + b;    h = (h - mean(h)) / sqrt(var(h) + eps) over each row;    out = (h + y) * y

The two unsqueezes make (B, 1, 1, F) of (B, F): one channel, 1 x F pixels. So the instance norm runs over the F features
of each row, not over the batch; PyTorch warns that one channel is not `out_features` of them, and goes on. The norm has
no parameters.

Shapes: x (B, in_features), y (B, out_features) or broadcastable to it, out (B, out_features); out_features of 1 is a
ValueError.
Work at the benchmark shapes: 0.37 GB (x, y, W and b read once, out written once), 137.4 GFLOP in the matrix product.
"""

import torch
from torch import nn

batch_size = 1024
in_features = 8192
out_features = 8192

on_cpu = dict(batch_size=256, in_features=2048, out_features=2048)  # the harness's sizes on a CPU

# Other shapes, for the harness's --sweep: one row to many, short and long products.
sweep = [
    dict(batch_size=batch, in_features=ins, out_features=outs)
    for batch, ins, outs in (
        (1, 1024, 4096), (4, 8192, 8192), (16, 1024, 4096), (64, 4096, 4096), (128, 8192, 8192), (256, 1024, 4096),
        (256, 8192, 2048), (512, 64, 8192), (700, 2048, 1024), (1024, 2048, 2048),
        (1024, 8192, 8192), (2048, 512, 512), (4096, 4096, 4096),
        (4096, 1024, 16384), (8192, 256, 1024), (16384, 1000, 1000), (32768, 1024, 4096), (65536, 128, 64),
        (65536, 16384, 1024),
    )
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.bmm = nn.Linear(in_features, out_features)
        self.instance_norm = nn.InstanceNorm2d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.bmm(x)
        h = self.instance_norm(h.unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
        h = h + y
        return h * y


def get_inputs(batch_size: int = batch_size):
    return [torch.rand(batch_size, in_features), torch.rand(batch_size, out_features)]


def get_init_inputs():
    return [in_features, out_features]
