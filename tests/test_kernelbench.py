"""Both kinds of file load unchanged in KernelBench's evaluation: the steps of its `eval_kernel_against_ref`.

In a fresh process, on any device. Its static checker's patterns are held against the kernel files in test_copying.py.
"""

import pytest
from cases import ROOT, STEMS
from processes import run_python

# As there: both sources are executed as text in one bare namespace, the second behind two lines that set the build
# folder; weights and inputs by seed, no load_state_dict; inputs are made on the CPU and moved; allclose within 1e-4.
STEPS = """
from pathlib import Path

model_path, kernel_path, device, small = sys.argv[1:]
build_folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
build = f"import os\\nos.environ['TORCH_EXTENSIONS_DIR'] = '{build_folder}'\\n"
context = {}
original = Path(model_path).read_text()
compile(original, "<string>", "exec")
exec(original, context)
Model, get_init_inputs, get_inputs = (context.get(name) for name in ("Model", "get_init_inputs", "get_inputs"))
torch.manual_seed(42)
init_inputs = get_init_inputs()
with torch.no_grad():
    torch.manual_seed(42)
    model = Model(*init_inputs)
os.environ["TORCH_USE_CUDA_DSA"] = "1"
custom = build + Path(kernel_path).read_text()
compile(custom, "<string>", "exec")
exec(custom, context)
ModelNew = context.get("ModelNew")
assert context["get_inputs"] is get_inputs
with torch.no_grad():
    torch.manual_seed(42)
    new = ModelNew(*init_inputs)
    torch.manual_seed(2**32 - 1)
    inputs = [x.to(dtype=torch.float32).to(device=device) for x in (get_inputs(int(small)) if small else get_inputs())]
    model, new = model.to(device=device, dtype=torch.float32), new.to(device=device, dtype=torch.float32)
    expected, out = model(*inputs), new(*inputs)
    assert out.shape == expected.shape
    assert torch.allclose(expected, out, atol=1e-4, rtol=1e-4), (expected - out).abs().max()
print("ok")
"""


@pytest.mark.parametrize("stem", STEMS)
def test_is_evaluated_as_kernelbench_does(stem, device, tmp_path):
    files = [ROOT / folder / f"{stem}.py" for folder in ("models", "kernels")]
    batch = "2" if device.type == "cpu" else ""  # the benchmark's own on a GPU
    assert run_python(STEPS, *files, device.type, batch, cwd=tmp_path, timeout=300) == "ok\n"
    assert not list(tmp_path.iterdir())
