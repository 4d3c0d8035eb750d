"""Changes one line of the kernels or the judge at a time and says which changes the tests notice.

    python tests/tools/mutate.py [--only WORD] [--cuda]

Each row of the table is a file, what stands there exactly once, what is put in its place, and the tests that must fail
then. A copy of the repository is changed, never the repository itself. Rows that only a GPU shows are run by --cuda
alone. That each row's text still stands in its file, exactly once, test_readme.py tests.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NORM, CONV = "instance_norm", "conv_sigmoid_group_norm"
HOPPER = "hopper/"
ROWS, SWISH = "linear_instance_norm_residual", "linear_swish_group_norm"

# Kernel files: pair, old, new, file of tests, run for the pair alone.
KERNELS = [
    # C++ on a CPU
    (NORM, "sum * mean_minus_shift) / n;", "sum * mean_minus_shift) / (n - 1);", "forward"),
    (NORM, "std::sqrt((variance < 0 ? 0 : variance) + eps);", "std::sqrt(variance < 0 ? 0 : variance);", "forward"),
    (NORM, "const double mean_minus_shift = sum / n,", "const double mean_minus_shift = sum / (n + 1),", "forward"),
    (NORM, "for (int64_t i = 0; i < n; ++i) y[i]", "for (int64_t i = 0; i < n - 1; ++i) y[i]", "forward"),
    (NORM, "double sum = 0;\n        double sum_squares = 0;", "float sum = 0, sum_squares = 0;", "forward"),
    (NORM, "    if (x.numel() == 0) return y;\n    const int64_t n =", "    const int64_t n =", "forward"),
    (NORM, "slice <= slices; ++slice", "slice < slices; ++slice", "forward"),
    (NORM, "end - begin, n, eps, bypass", "end - begin + 1, n, eps, bypass", "sanitizers"),
    (NORM, "    return y;\n}\n\n#ifdef WITH_CUDA", "    return y.transpose(-1, -2);\n}\n\n#ifdef WITH_CUDA", "forward"),
    (ROWS, "const double mean = sum / n;", "const double mean = h_row[0];", "forward"),
    (ROWS, "rstd = float(1 / std::sqrt(squares / n", "rstd = float(1 / std::sqrt(squares / (n - 1)", "forward"),
    (ROWS, "+ y_row[i]) * y_row[i];", "+ y_row[i]) * h_row[i];", "forward"),
    (ROWS, "row < end; ++row", "row + 1 < end; ++row", "forward"),
    (ROWS, "squares / n + eps", "squares / n + 1e-5", "forward"),
    (SWISH, "h / (Vec(1) + h.neg().exp()) + bias;", "h / (Vec(1) + h.neg().exp());", "forward"),
    (SWISH, "feature = i % groups * width;", "feature = 0;", "forward"),
    (SWISH, "- mean_lo) * factor + beta[i]", "- mean_lo) * factor + bias[i]", "forward"),
    (SWISH, "std::abs(factor) < INFINITY ? ", "true ? ", "forward"),
    (SWISH, "1 / std::sqrt(squares / width + eps)", "1 / std::sqrt(squares / width)", "forward"),
    (SWISH, "beta32 = as_f32(beta);", "beta32 = as_f32(bias);", "forward"),
    (CONV, "biases[i % v.size(1)], scales", "0.0f, scales", "convolution_on_cpu"),
    (CONV, "sums.squares / count - mean * mean", "sums.squares / count", "convolution_on_cpu"),
    (CONV, "out_height = x.sym_size(2) - weight.sym_size(2) + 1", "out_height = x.sym_size(2)", "compile"),
    (ROWS, ': {"forward", "gradient_product", "finish",', ': {"gradient_product", "finish",', "compile"),
    # Python
    (NORM, "and x.shape[-2] * x.shape[-1] != 1 ", "", "invalid"),
    (NORM, "and x.dim() in (3, 4)", "", "invalid"),
    (NORM, 'p.get("weight", 0) is p.get("bias", 0) is ', "", "dropin"),
    (NORM, "and not norm.track_running_stats", "", "dropin"),
    (NORM, " and norm.eps >= 2**-126", "", "dropin"),
    (NORM, " or torch.jit.is_tracing()", "", "dropin"),
    (NORM, "not isinstance(method, types.MethodType) or", "name not in vars(module) and", "dropin"),
    (NORM, "return not torch._C._are_functorch_transforms_active() and", "return True or", "training"),
    (NORM, "x.is_cpu and x.dtype is torch.float32", "x.is_cpu and x.dtype is not torch.float64", "forward"),
    (NORM, "not (torch.is_grad_enabled() and x.requires_grad)", "True", "gradients"),
    (NORM, "not _is_unchanged(norm, nn.InstanceNorm2d)", "norm is None", "dropin"),
    (NORM, "    fcntl.flock(lock, fcntl.LOCK_EX)", "    fcntl.flock", "build"),
    (ROWS, "type(module) is not kind", "not isinstance(module, kind)", "dropin"),
    (ROWS, " or method.__func__ is not function", "", "dropin"),
    (ROWS, "if hooks or ", "if ", "dropin"),
    (ROWS, "torch.compiler.is_exporting() and (", "False and (", "compile"),
    (ROWS, "return bare and not", "return not", "dropin"),
    (ROWS, " and norm.eps >= 2**-126", "", "dropin"),
    (ROWS, "h, y = h.view_as(h), y.view_as(y)", "h, y = h, y", "gradients"),
    (SWISH, "tensors = [t.view_as(t) for t in tensors]", "tensors = list(tensors)", "gradients"),
    (SWISH, "any(t.requires_grad for t in tensors)", "tensors[0].requires_grad", "gradients"),
    (SWISH, "v.dim() != 1 or v.shape[0] != n for v in vectors", "v.numel() < 1 for v in vectors", "forward"),
    (SWISH, "not _is_unchanged(norm, nn.GroupNorm) or", "", "dropin"),
    (CONV, "== ((1, 1), (0, 0), (1, 1), 1)", "== (conv.stride, (0, 0), (1, 1), 1)", "dropin"),
    (CONV, "_normalize(_activate(conv_out", "_normalize(_activate(conv_out.tanh()", "gradients"),
    (CONV, "not _is_nchw(x) or not _is_nchw(weight)", "not _is_nchw(x)", "forward"),
    (CONV, "v, groups, parameters[kGamma],", "v, groups, parameters[kBias].flatten(),", "convolution_on_cpu"),
    (CONV, "tensors = [t.view_as(t) for t in tensors]", "tensors = list(tensors)", "gradients"),
    (CONV, " or module._forward_pre_hooks", "", "dropin"),
    (CONV, " or module._backward_pre_hooks", "", "dropin"),
    (CONV, "nn.modules.module._has_any_global_hook() or ", "", "dropin"),
    (CONV, "_is_unchanged(conv, nn.Conv2d) and", "", "dropin"),
    (CONV, "not bias.shape == scale.shape == per_channel", "False", "convolution_on_cpu"),
    (CONV, "import contextlib\n", "import contextlib\nimport numpy\n", "copying"),
]  # fmt: skip

# The judge's own: file, old, new.
JUDGE = [
    ("gates", "limit = max(times * eager, ", "limit = max(10 * times * eager, "),
    ("check", "        if mine != theirs:", "        if False:"),
    ("gates", "(same, 0.0).nan_to_num_(inf, inf)", "(same, 0.0).nan_to_num_(0.0, 0.0)"),
    ("check", "with request.memory(case.device), of_the_model", "with of_the_model"),
    ("worker", "answers_of(instance, self._own(sets), request", "answers_of(instance, sets, request"),
    ("worker", 'if state != b"Z":', "if True:"),
    ("bench", "<= HIDDEN_SHARE * claimed", "<= 100 * HIDDEN_SHARE * claimed"),
    ("bench", "max(new[0] - eager[2], (new[0] - eager[0]) / 3)", "-1"),
    ("bench", "FASTER if low > 1 + margin", "FASTER if high > 1 + margin"),
    ("bench", "theirs / mine for mine, theirs", "mine / theirs for mine, theirs"),
]  # fmt: skip

# CUDA strings, and what only a GPU shows: pair, old, new, file of tests.
CUDA = [
    (NORM, "rsqrtf((variance < 0 ? 0 : variance) + eps);", "rsqrtf(variance < 0 ? 0 : variance);", "instance_norm"),
    (NORM, "offset = residual[0] * slope - residual[1];", "offset = 0;", "instance_norm"),
    (NORM, "sum[kSums] += __popc(mask);", "sum[kSums] += kValuesPer16Bytes<T>;", "instance_norm"),
    (NORM, "sums.store(warp_sums[round % 2][warp]", "sums.store(warp_sums[0][warp]", "instance_norm"),
    (HOPPER + SWISH, "mbarrier_wait(&shared.slot_full[slot_ring.index], slot_ring.parity);", "", "linear_products"),
    (HOPPER + SWISH, "mbarrier_wait(&shared.stage_empty[stage_ring.index], stage_ring.parity ^ 1);", "",
     "linear_products"),
    (HOPPER + SWISH, "-min(max(below, 0), kSpareBits);", "0;", "linear_products"),
    (CONV, "load_convolved<T>(p, tile, values);", "", "convolution"),
    (HOPPER + CONV, "values[in] = residual_of(values[in]);", "values[in] = values[in];", "convolution"),
    (SWISH, "if torch._C._are_functorch_transforms_active() or ", "if ", "training"),  # only slower on a CPU
]  # fmt: skip


def rows() -> list[tuple[str, str, str, list[str], bool]]:
    """Path, old, new, pytest's arguments, and whether a GPU is needed."""
    found = []
    for table, gpu in ((KERNELS, False), (CUDA, True)):
        for stem, old, new, tests in table:
            of_the_pair = {"build": ["-k", "not cuda"], "sanitizers": [], "invalid": []}.get(tests, ["-k", stem])
            found.append((f"kernels/{stem}.py", old, new, [f"tests/test_{tests}.py", *of_the_pair], gpu))
    return found + [(f"judge/{name}.py", old, new, ["tests/test_harness.py"], False) for name, old, new in JUDGE]


def lost(path: str, old: str) -> str | None:
    """What is wrong with a row's text, if anything."""
    times = (ROOT / path).read_text().count(old) if (ROOT / path).exists() else 0
    return None if times == 1 else f"LOST: in {path} this stands {times} times: give the row another text"


def verdict(path: str, old: str, new: str, tests: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".pytest_cache"))
        file = copy / path
        file.write_text(file.read_text().replace(old, new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = f" by {failed[0].partition('::')[2].partition('[')[0]}" if failed else f": exit {done.returncode}"
        return "MISSED" if done.returncode == 0 else f"caught{by}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose file or text has this word")
    parser.add_argument("--cuda", action="store_true", help="the rows that only a GPU shows")
    options, bad, caught = parser.parse_args(), 0, 0
    for path, old, new, tests, gpu in rows():
        if options.only not in f"{path} {old}" or gpu != options.cuda:
            continue
        said = lost(path, old) or verdict(path, old, new, tests)
        bad += not said.startswith("caught")
        caught += said.startswith("caught")
        print(f"| {path} | `{old.strip()[:60]}` | `{new.strip()[:60]}` | {said} |".replace("\n", " "), flush=True)
    print(f"{caught} caught, {bad} missed or lost")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
