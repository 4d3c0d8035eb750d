"""Trains every pair on several processes at once, and holds the losses against the Model's on one.

    torchrun --nproc-per-node=2 tests/tools/parallel_training.py [cpu]

NCCL where there are GPUs, gloo on the CPU. Under DistributedDataParallel, and under FSDP2's fully_shard, also
compiled, the mean loss of all ranks, each at its samples of the batch, must be step by step the Model's at the whole
batch. Prints a line a pair and way; exits with 1 if one differs.
"""

import copy
import datetime
import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from cases import FIRST, build, converted
from test_training import losses_of

STEPS = 5


class Network(nn.Module):
    """The module with a parameter before it: its input's gradient is needed, and each pair has something to learn."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.module = module

    def forward(self, x, *others):
        return self.module(x * self.gain, *others)


def sharded(network: nn.Module, mesh) -> nn.Module:
    fully_shard(network.module, mesh=mesh)  # a unit of its own, as a block of a larger network would be
    return fully_shard(network, mesh=mesh)


WAYS = {
    "DDP": lambda network, mesh: DistributedDataParallel(network),
    "FSDP2": sharded,
    "FSDP2, compiled": lambda network, mesh: torch.compile(sharded(network, mesh), backend="aot_eager"),
}


def mean_losses(network: nn.Module, batches: list, mine: slice) -> list[float]:
    """Of each step, the mean over the ranks."""
    of_this_rank = ([t[mine] for t in inputs] for inputs in batches)
    losses = torch.tensor(losses_of(network, of_this_rank, torch.optim.AdamW(network.parameters(), lr=0.01)))
    losses = losses.to(batches[0][0].device) / dist.get_world_size()
    dist.all_reduce(losses)
    return losses.tolist()


def main() -> int:
    device = "cpu" if "cpu" in sys.argv[1:] or not torch.cuda.is_available() else "cuda"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    mesh, wrong = init_device_mesh(device.partition(":")[0], (ranks,)), 0
    for case in FIRST:
        model, new, inputs = build(case, device)
        batches = [converted(case.inputs(2 * ranks), device) for _ in range(STEPS)]
        width = inputs[0].shape[-1]
        expected = mean_losses(Network(model, width).to(device), batches, slice(None))
        for way, wrap in WAYS.items():
            torch._dynamo.reset()
            network = Network(copy.deepcopy(new), width).to(device)
            losses = mean_losses(wrap(network, mesh), batches, slice(rank, None, ranks))
            same = all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(losses, expected, strict=True))
            wrong += not same
            if rank == 0:
                steps = " ".join(f"{a:.6f}/{b:.6f}" for a, b in zip(losses, expected, strict=True))
                print(f"{case.stem}, {way}: {'same' if same else 'DIFFERS'}: {steps}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the mesh keeps gloo's threads, which may abort a process that ends in order
