"""Instance normalisation of a batch of images: KernelBench level 1, problem 34.

    y[n, c] = (x[n, c] - mean(x[n, c])) / sqrt(var(x[n, c]) + eps)

over the H x W values of each (sample, channel), with the biased variance; no affine parameters, no running statistics.

Shapes: x (N, C, H, W) or (C, H, W), float64, float32, float16 or bfloat16; y the same. An H x W of a single value is a
ValueError.
Work at the benchmark shapes: 15.03 GB (x read once, y written once), no matrix product.
"""

import torch
from torch import nn

batch_size = 112
features = 64
dim1 = 512
dim2 = 512

on_cpu = dict(batch_size=4, dim1=128, dim2=128)  # the harness's sizes on a CPU

# Other shapes, for the harness's --sweep: small images in thousands, odd sizes, more than 2^31 values, and slices too
# large for a chip.
sweep = [
    dict(zip(("batch_size", "features", "dim1", "dim2"), shape))
    for shape in (
        (1, 64, 64, 64), (16, 64, 32, 32), (64, 512, 7, 7), (16, 64, 112, 112), (4096, 512, 4, 4), (1024, 1024, 7, 7),
        (1024, 1024, 8, 8), (512, 1024, 14, 14), (512, 512, 16, 16), (256, 256, 33, 33), (112, 64, 64, 64),
        (112, 64, 128, 128), (112, 64, 256, 256), (112, 64, 364, 364), (112, 64, 512, 512), (144, 64, 512, 512),
        (28, 64, 1024, 1024), (8, 64, 1448, 1448), (7, 64, 2048, 2048), (8, 3, 2160, 3840),
    )
]  # fmt: skip


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
