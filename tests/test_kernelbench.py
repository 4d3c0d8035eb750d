"""Both kinds of file load unchanged in KernelBench's evaluation: the steps of its `eval_kernel_against_ref`.

In a fresh process, on any device. Its static checker's patterns are held against the kernel files in test_copying.py.
"""

from cases import ROOT, STEMS
from processes import run_python

# As there: both sources are executed as text in one bare namespace, the second behind two lines that set the build
# folder; weights and inputs by seed, no load_state_dict; inputs are made on the CPU and moved; allclose within 1e-4.
STEPS = """
from pathlib import Path

folder, device, small, *stems = sys.argv[1:]
build_folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
build = f"import os\\nos.environ['TORCH_EXTENSIONS_DIR'] = '{build_folder}'\\n"
os.environ["TORCH_USE_CUDA_DSA"] = "1"
for stem in stems:
    original = Path(folder, "models", Path(f"{stem}.py").name).read_text()
    custom = build + Path(folder, "kernels", f"{stem}.py").read_text()
    context = {}
    compile(original, "<string>", "exec")
    exec(original, context)
    Model, get_init_inputs, get_inputs = (context.get(name) for name in ("Model", "get_init_inputs", "get_inputs"))
    torch.manual_seed(42)
    init_inputs = get_init_inputs()
    with torch.no_grad():
        torch.manual_seed(42)
        model = Model(*init_inputs)
    compile(custom, "<string>", "exec")
    exec(custom, context)
    ModelNew = context.get("ModelNew")
    assert context["get_inputs"] is get_inputs
    with torch.no_grad():
        torch.manual_seed(42)
        new = ModelNew(*init_inputs)
        torch.manual_seed(2**32 - 1)
        inputs = get_inputs(int(small)) if small else get_inputs()
        inputs = [x.to(dtype=torch.float32).to(device=device) for x in inputs]
        model, new = model.to(device=device, dtype=torch.float32), new.to(device=device, dtype=torch.float32)
        expected, out = model(*inputs), new(*inputs)
        assert out.shape == expected.shape
        assert torch.allclose(expected, out, atol=1e-4, rtol=1e-4), (stem, (expected - out).abs().max())
    print(stem)
"""


def test_is_evaluated_as_kernelbench_does(device, tmp_path):
    batch = "2" if device.type == "cpu" else ""  # the benchmark's own on a GPU
    assert run_python(STEPS, ROOT, device.type, batch, *STEMS, cwd=tmp_path, timeout=300).split() == STEMS
    assert not list(tmp_path.iterdir())
