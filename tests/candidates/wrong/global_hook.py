"""A hook on every module's forward, the Model's too.

Rejected: the candidate leaves torch.nn's _global_forward_hooks changed
"""

import torch
import torch.nn.functional as F
from torch import nn

nn.modules.module.register_module_forward_hook(lambda module, args, out: None)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)
