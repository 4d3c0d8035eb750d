"""A convolution, a bias, a scale, a sigmoid, group normalisation: KernelBench level 2, problem 21.

    h = conv2d(x, W) + b;    h = sigmoid((h + bias) * scale);    out = GroupNorm(h) with weight and bias

No padding, stride 1. The norm runs over the out_channels / num_groups channels and all pixels of each group of each
sample.

Shapes: x (N, in_channels, H, W), bias and scale broadcastable to (N, out_channels, H - k + 1, W - k + 1), out of that
shape.
Work at the benchmark shapes: 1.33 GB (x, W and the vectors read once, out written once), 38.1 GFLOP in the convolution.
"""

import torch
from torch import nn

batch_size = 128
in_channels = 8
out_channels = 32
height = 256
width = 256
kernel_size = 3
num_groups = 8
bias_shape = (out_channels, 1, 1)
scale_shape = (out_channels, 1, 1)

on_cpu = dict(batch_size=4, height=128, width=128)  # the harness's sizes on a CPU

# Other shapes, for the harness's --sweep: few and many samples, channels, groups, small and large images, 1x1 and 5x5 kernels.
sweep = [
    dict(
        batch_size=batch, in_channels=ins, out_channels=outs, kernel_size=kernel, num_groups=groups,
        height=side, width=side,
        bias_shape=(outs, 1, 1), scale_shape=(outs, 1, 1),
    )
    for batch, ins, outs, kernel, groups, side in (
        (1, 8, 32, 3, 8, 64), (1, 8, 32, 3, 8, 256), (8, 8, 32, 3, 8, 256), (32, 8, 32, 3, 8, 256),
        (128, 8, 32, 3, 8, 256), (1024, 3, 16, 3, 4, 32), (256, 3, 32, 3, 8, 64), (256, 8, 32, 1, 8, 128),
        (64, 16, 64, 3, 8, 128), (32, 32, 64, 3, 16, 128), (16, 64, 128, 3, 32, 112), (64, 64, 128, 1, 1, 56),
        (8, 8, 32, 3, 8, 1024), (2, 3, 64, 3, 4, 2048), (64, 8, 32, 5, 8, 128),
    )
]  # fmt: skip


class Model(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        num_groups: int,
        bias_shape: tuple,
        scale_shape: tuple,
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        h = h + self.bias
        h = h * self.scale
        h = torch.sigmoid(h)
        return self.group_norm(h)


def get_inputs(batch_size: int = batch_size):
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape]
