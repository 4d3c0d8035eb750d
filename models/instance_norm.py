"""Instance normalisation of a batch of images: KernelBench level 1, problem 34.

    y[n, c] = (x[n, c] - mean(x[n, c])) / sqrt(var(x[n, c]) + eps)

over the H x W values of each (sample, channel), with the biased variance; no affine parameters, no running statistics.

Shapes: x (N, C, H, W) or (C, H, W), float64, float32, float16 or bfloat16; y the same. An H x W of a single value is a ValueError.
Work at the benchmark shapes: 15.03 GB (x read once, y written once), no matrix product.
"""

import torch
from torch import nn

batch_size = 112
features = 64
dim1 = 512
dim2 = 512


class Model(nn.Module):
    def __init__(self, num_features: int):
        super().__init__()
        self.inorm = nn.InstanceNorm2d(num_features=num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inorm(x)


def get_inputs(batch_size: int = batch_size):
    return [torch.rand(batch_size, features, dim1, dim2)]


def get_init_inputs():
    return [features]
