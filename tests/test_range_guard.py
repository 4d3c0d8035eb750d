"""What the float32 product's range guard costs: the kernels as they are, against copies from which the guard is cut out.

    python tests/test_range_guard.py [SECONDS_EACH]     on a GPU: both pairs at their benchmark shapes, forward, in turns; 1.5 s each

One scale a row does not keep float32's range. The guard does: of each row the split counts what fp16 loses, the epilogue holds every output
against the doubts of its row and column and flags those that may be off, and a kernel behind the product puts float32's sums there. Without
it the same kernels are as exact on ordinary data, and wrong on badly scaled ones; both are checked before anything is timed.
"""

import hashlib
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cases import ROOT, STEMS, load, solution
from sources import source
from test_float32_gemm import PAIRS, balanced, worst

sys.path.insert(0, str(ROOT))

sys.path.append(str(ROOT / "tests" / "tools"))

from in_turns import compare
from judge.problem import Problem

# What is cut out of a kernel file, each pattern once, and what stands there instead.
GUARD = {
    r" *for \(int64_t i = int64_t\(blockIdx\.x\) \* kSplitBlock[^\n]*flags\[i\] = 0;\n": "",  # the split clears the flags,
    r", leave\(1, __reduce_min_sync\(~0u, least\)\)": "",  # looks for values that lose something,
    r", least = __reduce_min_sync\(~0u, take\(1\)\)": "",
    r" *const auto add_up = [^\n]*\n": "",  # adds up a row's values,
    r" *add_up\(v\.x\)[^\n]*\n": "",
    r" *leave\(2, .*?squares = sum_of\(3\);\n": "",
    r" *const uint32_t intact = .*?lost = sum_of\(4\);\n    }\n": "",  # counts those that lose
    r"result\.doubt = kDoubt<kPieces> \* lost;.*?result\.doubt = -INFINITY;[^\n]*\n": "result.doubt = 0;\n",  # and leaves a doubt;
    r" *doubt\[i\] = epilogue\.doubt\(own\);\n": "",  # the epilogue reads it,
    r" *const float most = largest\(doubt\[i\]\);\n": "",  # finds the largest of some columns
    r" *if \(lane == 0\) margins\.column_doubts[^\n]*\n": "",
    r" *const float most = largest\(row\.y\);\n": "",  # and of some rows
    r" *if \(own_thread < kTileM && lane == 0\) margins\.row_doubts[^\n]*\n": "",
    r"const bool certain = !__any_sync\(~0u, margins[^\n]*\n": "const bool certain = true;\n",  # and holds the outputs against them;
    r"return error != cudaSuccess \? error : launch_recompute\(epilogue, device, stream\);": "return error;",  # what is flagged is recomputed
}


def without_guard(text: str) -> str:
    for pattern, instead in GUARD.items():
        text, found = re.subn(pattern, lambda match, instead=instead: instead, text, flags=re.DOTALL)
        assert found == 1, f"{found} places match {pattern}"
    return text


@pytest.mark.parametrize("stem", [stem for stem in PAIRS if stem in STEMS])
def test_the_guard_is_found(stem):
    text, bare = source(stem), without_guard(source(stem))
    assert 5 < text.count("\n") - bare.count("\n") < 30, "a few lines, not half of a file"
    assert "launch_recompute(epilogue" in text and "launch_recompute(epilogue" not in bare


def unguarded(stem: str):
    """The file without its guard, as a module of its own."""
    text = without_guard(source(stem))
    folder = Path(tempfile.gettempdir()) / f"unguarded_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.py").write_text(text)
    module = load(folder / f"{stem}.py", f"unguarded_{stem}")
    if isinstance(module, Exception):
        raise module
    return module


def check(modules: dict) -> None:
    """That the copy differs where it should, and nowhere else: in linear_instance_norm_residual, the bare product."""
    draw = {"ordinary": lambda x, w: (x, w), "badly scaled": balanced}
    for name, change in draw.items():
        torch.manual_seed(0)
        x, w = change(torch.randn(2048, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda") / 32)
        right, terms = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
        errors = {
            which: worst(getattr(torch.ops, module.NAMESPACE).linear(x, w, w.new_zeros(1024)), right, terms) for which, module in modules.items()
        }
        print(f"{name}: largest error, in units of 2^-24 of the terms' magnitudes: {errors['guarded']:.2f}, without the guard {errors['bare']:.2f}")
        assert errors["guarded"] < 2 and (errors["bare"] < 2) == (name == "ordinary")


def main(seconds_each: float = 1.5) -> None:
    for stem in PAIRS:
        check({"guarded": solution(stem), "bare": unguarded(stem)})
        bare = Path(unguarded(stem).__file__)
        problem = Problem(ROOT / "models" / f"{stem}.py")
        print("\n".join(compare(problem, [ROOT / "kernels" / f"{stem}.py", bare], problem.benchmark_batch, seconds_each)))


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
