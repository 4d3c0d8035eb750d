"""The float32 product of the linear pairs alone, at their benchmark shapes: its rate, and its time beside cuBLAS's.

    python tests/tools/product_rate.py         of the files in kernels/hopper/

cuBLAS multiplies fp16 matrices of three times the K, which is the tensor cores' work for one float32 product. Times are
the kernels' own, medians of 20 runs in turns, the second level cache cold, by torch.profiler. For sm_90.
"""

import sys
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from kernels.hopper import linear_instance_norm_residual, linear_swish_group_norm

RUNS = 20


def kernel_times(calls: dict) -> dict[str, float]:
    """The median milliseconds of the longest kernel of each call."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in calls}
    for _ in range(RUNS + 2):
        for name, call in calls.items():
            flush.zero_()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                call()
                torch.cuda.synchronize()
            times[name].append(max(event.device_time for event in recorded.events()) / 1000)
    return {name: median(values[2:]) for name, values in times.items()}


@torch.no_grad()
def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, groups = linear_instance_norm_residual, linear_swish_group_norm
    for module, (m, n, k), inputs, arguments in (
        (rows, (1024, 8192, 8192), ((1024, 8192), (1024, 8192)), (8192, 8192)),
        (groups, (32768, 4096, 1024), ((32768, 1024),), (1024, 4096, 64, (4096,))),
    ):
        tensors = [torch.rand(shape, device="cuda") for shape in inputs]
        model = module.ModelNew(*arguments).cuda()
        a, b = (torch.randn(size, 3 * k, device="cuda", dtype=torch.float16) for size in (m, n))
        times = kernel_times({"ours": lambda: model(*tensors), "cuBLAS": lambda: a @ b.T})
        rate = {name: 2 * m * n * k / ms / 1e9 for name, ms in times.items()}
        print(f"{module.__name__}: {times['ours']:.4f} ms, {rate['ours']:.0f} TFLOP/s of float32", end=", ")
        share = rate["ours"] / rate["cuBLAS"]
        print(f"{share:.0%} of the rate of cuBLAS's fp16 over a tripled K ({times['cuBLAS']:.4f} ms)")


if __name__ == "__main__":
    main()
