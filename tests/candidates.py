"""Candidates for the judge: wrong ones, with words of the reason each must be rejected for, and honest ones.

A table of bodies: `source(name)` gives a candidate's whole file and `model_of(name)` the Model it stands in for.
`python tests/tools/attack.py --write FOLDER` writes them out, and judges them without it.
"""

import textwrap
from dataclasses import dataclass

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""

MODEL = '''"""The small Model that most candidates stand in for: Linear, Swish, bias, GroupNorm."""

import torch
from torch import nn

batch_size = 32


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        h = self.matmul(x)
        h = torch.sigmoid(h) * h
        h = h + self.bias
        return self.group_norm(h)


def get_inputs(batch_size=batch_size):
    return [torch.rand(batch_size, 96)]


def get_init_inputs():
    return [96, 64, 8]
'''

NEW = """
class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.group_norm = nn.GroupNorm(num_groups, out_features)
{init}

    def right(self, x):
        return self.group_norm(F.silu(self.matmul(x)) + self.bias)

{methods}
    def forward(self, x):
{forward}
"""

ANY_MODEL = (
    HEAD
    + """
batch_size = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        return {answer}


def get_inputs(batch_size=batch_size):
    return [{inputs}]


def get_init_inputs():
    return []
"""
)


@dataclass(frozen=True)
class Candidate:
    what: str
    forward: str = "return self.right(x)"
    rejected: str | None = None  # words of the reason; None for one that must be accepted
    top: str = ""
    init: str = ""
    methods: str = ""
    shows: str = "forward"  # the first direction in which it is wrong; an honest one is judged in all
    needs_gpu: bool = False
    by_clock: bool = False  # its time is what gives it away: judged alone
    model: str = MODEL  # where it is another: the candidate is this Model itself, with these words replaced
    replaced: tuple = ()
    timeout: float = 60.0
    file: str = ""  # the whole file


def any_model(answer: str, inputs: str = "torch.rand(batch_size, 64)", init: str = "pass") -> str:
    return ANY_MODEL.format(answer=answer, inputs=inputs, init=init)


def source(name: str) -> str:
    candidate = CANDIDATES[name]
    said = f'"""{candidate.what}' + (f"\n\nRejected: {candidate.rejected}\n" if candidate.rejected else "") + '"""\n'
    if candidate.file:
        return said + candidate.file
    if candidate.model != MODEL:
        text = candidate.model.replace("class Model(", "class ModelNew(")
        for old, new in candidate.replaced:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        return said + candidate.top + text
    lines = {
        name: textwrap.indent(textwrap.dedent(getattr(candidate, name)).strip(), " " * 8)
        for name in ("forward", "init")
    }
    return (
        said
        + HEAD
        + textwrap.dedent(candidate.top)
        + NEW.format(methods=textwrap.indent(textwrap.dedent(candidate.methods), "    "), **lines)
    )


def model_of(name: str) -> str:
    return CANDIDATES[name].model


def names(kind: str) -> list[str]:
    """Of the wrong ones or the honest ones."""
    return [name for name, candidate in CANDIDATES.items() if (candidate.rejected is None) == (kind == "honest")]


ROUNDED = '''
def rounded(t, bits):
    """Keeps so many bits of mantissa."""
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)


def rounded_product(linear, x, bits):
    return F.linear(rounded(x, bits), rounded(linear.weight, bits), linear.bias)
'''
FUNCTION = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        {}
"""
SLICED = any_model("(x @ self.w)[:, -1]", "torch.rand(batch_size, 4, 16)", "self.w = nn.Parameter(torch.randn(16, 8))")
NORM = any_model("self.norm(x)", "torch.rand(batch_size, 4, 8, 8)", "self.norm = nn.InstanceNorm2d(4, affine=True)")
ARGMAX = any_model("torch.argmax(x, 1)", "torch.randn(batch_size, 64)")

CANDIDATES = {
    # ---- wrong answers
    "zeros": Candidate("Returns zeros.", "return torch.zeros_like(self.right(x))", "is constant, the Model's is not"),
    "swapped_operations": Candidate(
        "Adds the bias before Swish.",
        "return self.group_norm(F.silu(self.matmul(x) + self.bias))",
        "not close to the Model's",
    ),
    "no_affine_parameters": Candidate(
        "Ignores the norm's weight and bias, which are 1 and 0 in a fresh module.",
        "return F.group_norm(F.silu(self.matmul(x)) + self.bias, self.group_norm.num_groups)",
        "not close to the Model's",
    ),
    "15_bit_product": Candidate(
        "Multiplies with 15 bits: inside gate 1, and imprecise.",
        "return self.group_norm(F.silu(rounded_product(self.matmul, x, 15)) + self.bias)",
        "error against float64",
        top=ROUNDED,
    ),
    "tf32_product": Candidate(
        "Multiplies with TF32's 10 bits where nobody allowed it.",
        "return self.group_norm(F.silu(rounded_product(self.matmul, x, 10)) + self.bias)",
        "not close to the Model's",
        top=ROUNDED,
    ),
    "bfloat16_product": Candidate(
        "The product in bfloat16.",
        """
        h = F.linear(x.bfloat16(), self.matmul.weight.bfloat16(), self.matmul.bias.bfloat16()).to(x.dtype)
        return self.group_norm(F.silu(h) + self.bias)
        """,
        "not close to the Model's",
    ),
    "unwritten_tail": Candidate(
        "Leaves the last row unwritten.",
        """
        out = torch.empty(len(x), 64, device=x.device)
        out[:-1] = self.right(x)[:-1]
        return out
        """,
        "NaN in one and not in the other",
    ),
    "freed_memory": Candidate(
        "Computes nothing: takes memory as the allocator hands it out.",
        """
        storage = torch.UntypedStorage(64 * len(x) * x.element_size(), device=x.device)
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (len(x), 64), (64, 1))
        """,
        "elements are",
    ),
    # ---- another form
    "a_list": Candidate("Returns a list.", "return [self.right(x)]", "gives 1 values as"),
    "another_shape": Candidate(
        "Returns another shape.", "return self.right(x)[None]", "output has shape [1, 32, 64], the Model's has [32, 64]"
    ),
    "float64_output": Candidate(
        "Returns float64.", "return self.right(x).double()", "output has dtype torch.float64, the Model's has"
    ),
    "other_strides": Candidate(
        "The right values in other strides.", "return self.right(x).t().contiguous().t()", "output has stride [1, 32]"
    ),
    "lazy_tensor": Candidate(
        "A tensor subclass that computes when it is looked at, which is after the clock has stopped.",
        """
        out = x.new_empty(len(x), 64).as_subclass(Lazy)
        out.compute = lambda: self.right(x)
        return out
        """,
        "output is a Lazy, the Model's is a Tensor",
        top="""
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(t.compute() if isinstance(t, Lazy) else t for t in args), **(kwargs or {}))
""",
    ),
    # ---- the module
    "no_model_new": Candidate("Has no ModelNew.", rejected="has no attribute 'ModelNew' at import", file="\n"),
    "raises_at_import": Candidate(
        "Raises at import.",
        rejected="raised NameError: name 'undefined_name' is not defined at import",
        top="undefined_name",
    ),
    "raises_in_a_call": Candidate(
        "Raises in a call.", 'raise RuntimeError("no kernel for this")', "raised RuntimeError: no kernel for this"
    ),
    "one_more_parameter": Candidate(
        "One parameter more.", rejected="state_dict: its keys are", init="self.gamma = nn.Parameter(torch.ones(3))"
    ),
    "buffer_for_a_parameter": Candidate(
        "The bias is in the state_dict, but nobody could train it.",
        rejected="state_dict: bias has requires_grad",
        init="del self.bias\nself.register_buffer('bias', torch.randn(0))\nself.bias = torch.zeros(out_features)",
    ),
    "other_initial_weights": Candidate(
        "Draws its weights differently.",
        rejected="the same seed does not give the Model's bias",
        init="nn.init.zeros_(self.bias)",
    ),
    "exits_in_its_state": Candidate(
        "Exits where its state is asked for.",
        rejected="raised SystemExit",
        methods="def state_dict(self, *args, **kwargs):\n    raise SystemExit(0)\n",
    ),
    # ---- what a call leaves behind
    "first_call_only": Candidate(
        "Is right on the first call only.",
        "self.calls += 1\nreturn self.right(x) + (1.0 if self.calls > 1 else 0.0)",
        "not close to the Model's",
        init="self.calls = 0",
    ),
    "first_weights": Candidate(
        "Remembers the weights as they were at the first call.",
        """
        if self.weight is None:
            self.weight = self.matmul.weight.detach().clone()
        return self.group_norm(F.silu(F.linear(x, self.weight, self.matmul.bias)) + self.bias)
        """,
        "not close to the Model's",
        init="self.weight = None",
    ),
    "remembers_where_its_weights_lay": Candidate(
        "Reads its weights where they lay at its first call, as a kernel does that keeps a pointer.",
        """
        self.place = self.place or self.matmul.weight.data_ptr()
        weight = self.matmul.weight if self.matmul.weight.data_ptr() == self.place else self.matmul.weight.flip(0)
        return self.group_norm(F.silu(F.linear(x, weight, self.matmul.bias)) + self.bias)
        """,
        "after the weights moved in memory",
        init="self.place = None",
    ),
    "packed_by_shape": Candidate(
        "Keeps a packed weight in a global by its shape and version, so that two layers share it.",
        """
        key = self.matmul.weight.shape, self.matmul.weight._version
        if key not in packed:
            packed[key] = self.matmul.weight.detach().clone()
        return self.group_norm(F.silu(F.linear(x, packed[key], self.matmul.bias)) + self.bias)
        """,
        "two instances with other weights in turns",
        top="packed = {}",
    ),
    "previous_answer": Candidate(
        "Returns the answer of the call before.",
        "stale, self.kept = self.kept, self.right(x)\nreturn self.kept if stale is None else stale",
        "not close to the Model's",
        init="self.kept = None",
    ),
    "cache_by_address": Candidate(
        "Remembers answers by the input's address.",
        """
        if x.data_ptr() not in answers:
            answers[x.data_ptr()] = (x, self.right(x))
        return answers[x.data_ptr()][1]
        """,
        "not close to the Model's",
        top="answers = {}",
    ),
    "cache_by_address_of_indices": Candidate(
        "Remembers answers by the input's address, where an answer does not depend on the scale of the inputs.",
        rejected="not close to the Model's",
        top="answers = {}\n",
        model=ARGMAX,
        replaced=(
            ("return torch.argmax(x, 1)", "return answers.setdefault(x.data_ptr(), (x, torch.argmax(x, 1)))[1]"),
        ),
    ),
    "one_static_buffer": Candidate(
        "Every answer is written into the same memory.",
        """
        if self.kept is None or self.kept.shape[0] != len(x):
            self.kept = self.right(x).clone()
        return self.kept.copy_(self.right(x))
        """,
        "kept while it was called again",
        init="self.kept = None",
    ),
    "two_static_buffers": Candidate(
        "Answers are written into two buffers, in turns.",
        """
        y = self.right(x)
        if not self.kept or self.kept[0].shape != y.shape:
            self.kept = [torch.empty_like(y) for _ in range(2)]
        self.kept.reverse()
        return self.kept[0].copy_(y)
        """,
        "kept while it was called again",
        init="self.kept = []",
    ),
    "writes_its_input": Candidate(
        "Writes its input.", "out = self.right(x)\nx.add_(1.0)\nreturn out", "writes input 0"
    ),
    "writes_its_weights": Candidate(
        "Writes a parameter.", "out = self.right(x)\nself.bias.data.add_(1.0)\nreturn out", "writes bias"
    ),
    "draws_random_numbers": Candidate(
        "Noise from PyTorch's generator.",
        "return self.right(x) * (1 + 1e-7 * torch.rand((), device=x.device))",
        "changes PyTorch's random state",
    ),
    "sets_the_seed": Candidate(
        "Sets the seed, for everybody.", "torch.manual_seed(0)\nreturn self.right(x)", "changes PyTorch's random state"
    ),
    # ---- other modes, values, layouts, batches
    "grad_mode": Candidate(
        "Computes only while no gradients are recorded.",
        "return self.matmul(x) if torch.is_grad_enabled() else self.right(x)",
        "with gradients recorded",
    ),
    "zeros_in_training": Candidate(
        "Zeros in training mode.",
        "return torch.zeros_like(x[:, :64]) if self.training else self.right(x)",
        "in training mode",
    ),
    "zeros_in_inference_mode": Candidate(
        "Zeros in inference mode.",
        "return torch.zeros_like(x[:, :64]) if torch.is_inference_mode_enabled() else self.right(x)",
        "in inference mode",
    ),
    "positive_inputs": Candidate(
        "Right where no input is below zero.", "return self.right(x.relu())", "values of both signs"
    ),
    "positive_scales": Candidate(
        "Right where no factor of the norm is below zero.",
        """
        norm = self.group_norm
        return F.group_norm(F.silu(self.matmul(x)) + self.bias, norm.num_groups, norm.weight.abs(), norm.bias, norm.eps)
        """,
        "values of both signs",
    ),
    "mean_of_squares": Candidate(
        "The variance as E[x^2] - E[x]^2.",
        """
        h = (F.silu(self.matmul(x)) + self.bias).unflatten(1, (8, 8))
        variance = h.square().mean(2, keepdim=True) - h.mean(2, keepdim=True).square()
        h = (h - h.mean(2, keepdim=True)) * torch.rsqrt(variance.relu() + self.group_norm.eps)
        return h.flatten(1) * self.group_norm.weight + self.group_norm.bias
        """,
        "biases whose mean is large",
    ),
    "mean_of_squares_of_an_instance": Candidate(
        "The same for InstanceNorm2d, near enough where the mean is small.",
        rejected="values whose mean is large",
        model=NORM,
        replaced=(
            (
                "return self.norm(x)",
                "m = x.double().mean((2, 3), keepdim=True)\n"
                "        v = x.square().double().mean((2, 3), keepdim=True).float() - m.float().square()\n"
                "        y = (x - m) * torch.rsqrt(v.double() + self.norm.eps)\n"
                "        return (y * self.norm.weight.view(-1, 1, 1) + self.norm.bias.view(-1, 1, 1)).to(x.dtype)",
            ),
        ),
    ),
    "no_epsilon": Candidate(
        "Forgets the norm's epsilon.",
        rejected="error against float64",
        model=NORM,
        replaced=(("nn.InstanceNorm2d(4, affine=True)", "nn.InstanceNorm2d(4, affine=True, eps=1e-12)"),),
    ),
    "hides_nan": Candidate(
        "Replaces NaN by numbers.", "return self.right(torch.where(x.isnan(), 0.0, x))", "one NaN in each input"
    ),
    "clamps_infinity": Candidate(
        "Replaces infinities by numbers.", "return self.right(x.clamp(-1e30, 1e30))", "one infinity in each input"
    ),
    "dense_rows": Candidate(
        "Takes the input for rows side by side in memory.",
        "return self.right(x.as_strided(x.shape, (x.shape[1], 1)))",
        "inputs that are transposed",
    ),
    "rows_of_a_matrix": Candidate(
        "Asks whether the last dimension is dense, and takes the rows for side by side.",
        "return self.right(x.as_strided(x.shape, (x.shape[1], 1)) if x.stride(1) == 1 else x)",
        "inputs that are a slice",
    ),
    "aligned_vectors": Candidate(
        "Loads vectors of 16 bytes, from where the nearest begins.",
        "return self.right(x.as_strided(x.shape, x.stride(), x.storage_offset() // 4 * 4))",
        "inputs that are off any alignment",
    ),
    "one_batch": Candidate(
        "Knows the answer for the benchmark's batch.",
        "return self.right(x) if len(x) == 32 else self.matmul(x)",
        "(batch ",
    ),
    "few_batches": Candidate(
        "Knows the answer for the batches that a test may ask for.",
        "return self.right(x) if len(x) in (0, 1, 22, 32, 33) else torch.zeros_like(x[:, :64])",
        "(batch ",
    ),
    "no_empty_batch": Candidate(
        "Divides by the batch.", "return self.right(x) * (len(x) // len(x))", "raised ZeroDivisionError"
    ),
    "workspace_of_one_size": Candidate(
        "A workspace of the benchmark's size: what does not fit is left out.",
        """
        out = torch.zeros(32, 64, dtype=x.dtype, device=x.device)
        out[: len(x)] = self.right(x[:32])
        return torch.cat([out, out])[: len(x)].clone()
        """,
        "(batch 33)",
    ),
    "default_stream": Candidate(
        "Works on the default stream, whatever the current one is.",
        "with torch.cuda.stream(torch.cuda.default_stream()):\n    return self.right(x)",
        "on another stream",
        needs_gpu=True,
    ),
    "side_stream": Candidate(
        "Works on a stream of its own, so that the events on the current one time nothing.",
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            return self.right(x)
        """,
        "the Model's",
        needs_gpu=True,
    ),
    # ---- gradients
    "no_gradient": Candidate(
        "Gives no gradient.", "return self.right(x).detach()", "has requires_grad False", shows="forward_recorded"
    ),
    "cut_off_parameter": Candidate(
        "Cuts a parameter off.",
        "return self.group_norm(F.silu(self.matmul(x)) + self.bias.detach())",
        "gradient of bias is a NoneType",
        shows="forward_backward",
    ),
    "sum_as_the_loss": Candidate(
        "Takes a sum as the loss for granted.",
        "return Function.apply(self.right(x))",
        "gradient of input 0",
        top=FUNCTION.format("return torch.ones_like(g)"),
        shows="forward_backward",
    ),
    "imprecise_gradient": Candidate(
        "Has an imprecise gradient.",
        "return Function.apply(self.right(x))",
        "error against float64",
        top=FUNCTION.format("return g * (1 + 1e-5 * torch.cos(1e3 * g))"),
        shows="forward_backward",
    ),
    "remembered_gradient": Candidate(
        "Computes its gradient once and remembers it.",
        "return Function.apply(self.right(x))",
        "gradient of",
        top="kept = []" + FUNCTION.format("kept.append(g)\n        return kept[0]"),
        shows="forward_backward",
    ),
    "writes_what_comes_in": Candidate(
        "The backward pass overwrites the gradient that comes in, which others may want too.",
        "return Function.apply(self.right(x))",
        "writes the gradient that comes in",
        top=FUNCTION.format("out = g.clone()\n        g.zero_()\n        return out"),
        shows="forward_backward",
    ),
    "dense_gradient": Candidate(
        "Takes the gradient that comes in for rows side by side in memory, which behind a sum it is not.",
        "return Function.apply(self.right(x))",
        "an incoming gradient that is expanded",
        top=FUNCTION.format("return g.as_strided(g.shape, (g.shape[1], 1)).clone()"),
        shows="forward_backward",
    ),
    "gradient_of_the_last_forward": Candidate(
        "The backward pass reads what the last forward pass left on the module.",
        "return Function.apply(self.matmul(x), self)",
        "two forward passes before two backward passes",
        top="""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, module):
        ctx.module, module.h = module, h
        return h * torch.sigmoid(h)

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.module.h)
        return g * (s + ctx.module.h * s * (1 - s)), None
""",
        methods="""
def right(self, x):
    return self.group_norm(F.silu(self.matmul(x)) + self.bias)

def __call__(self, x):
    return self.group_norm(super().__call__(x) + self.bias)
""",
        shows="forward_backward",
    ),
    "adds_to_grad": Candidate(
        "The backward pass adds to the parameter's .grad itself.",
        "return Function.apply(self.right(x), self.bias)",
        "writes the .grad of bias",
        top="""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.bias = bias
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.bias.grad = g.sum(0) if ctx.bias.grad is None else ctx.bias.grad + g.sum(0)
        return g, None
""",
        shows="forward_backward",
    ),
    "eats_what_it_saved": Candidate(
        "The backward pass writes over the tensors that the forward pass saved.",
        "return self.group_norm(Function.apply(self.matmul(x)) + self.bias)",
        "a second backward pass of one graph",
        top="""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.s = torch.sigmoid(h)
        ctx.h = h
        return h * ctx.s

    @staticmethod
    def backward(ctx, g):
        gradient = g * (ctx.s + ctx.h * ctx.s * (1 - ctx.s))
        ctx.s.copy_(gradient)
        return gradient
""",
        shows="forward_backward",
    ),
    "all_gradients_or_none": Candidate(
        "The backward pass takes for granted that the input's gradient is wanted.",
        "return self.group_norm(F.silu(Function.apply(x, self.matmul.weight, self.matmul.bias)) + self.bias)",
        "only the parameters' gradients wanted",
        top="""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        given = g @ weight
        return given, (g.t() @ x if ctx.needs_input_grad[0] else torch.zeros_like(weight)), g.sum(0)
""",
        shows="forward_backward",
    ),
    # ---- while it is timed
    "looks_at_its_caller": Candidate(
        "Reads the stack, and computes nothing while it is being timed.",
        """
        frame = sys._getframe()
        while frame:
            if frame.f_code.co_name == "time":
                return x.new_zeros(len(x), 64)
            frame = frame.f_back
        return self.right(x)
        """,
        "while it was timed",
        top="import sys\n",
    ),
    "tired_after_a_while": Candidate(
        "Right for as many calls as a check may take, then the answer it has.",
        """
        self.calls += 1
        if self.calls < 100 or self.kept.shape[0] != len(x):
            self.kept = self.right(x)
        return self.kept
        """,
        "not close to the Model's",
        init="self.calls, self.kept = 0, None",
    ),
    "spares_digits_when_timed": Candidate(
        "Accurate, but for calls that come in quick succession, as they do when timed: there it spares digits.",
        """
        self.running = self.running + 1 if time.monotonic() - self.last < 0.02 else 0
        self.last = time.monotonic()
        out = self.right(x)
        return out if self.running < 3 else out + (torch.round(out * 2**14) / 2**14 - out).detach()
        """,
        "error against float64",
        init="self.last, self.running = 0, 0",
        top="import time\n",
    ),
    "clock_that_runs_slowly": Candidate(
        "Exchanges the clock of its process, the C function and all that hold it.",
        "time.sleep(0.01)\nreturn self.right(x)",
        "its own clock says",
        by_clock=True,
        top="""
        import time
        import judge.worker
        real = time.perf_counter
        judge.worker.perf_counter = time.perf_counter = lambda: 0.1 * real()
        judge.worker.Event = type("Event", (judge.worker.Event,), {"elapsed_time": lambda self, end: 1e-3})
        """,
    ),
    "answers_for_the_worker": Candidate(
        "Finds the worker's object among the living ones and exchanges the method that times.",
        """
        for thing in gc.get_objects():
            if type(thing).__name__ == "Contender" and not self.done:
                self.done, real = True, thing._claims
                thing._claims = lambda *asked: [(1e-3 * ms, *rest) for ms, *rest in real(*asked)]
        time.sleep(0.005)
        return self.right(x)
        """,
        "its own clock says",
        by_clock=True,
        top="import gc\nimport time\n",
        init="self.done = False",
    ),
    "lazy_in_the_copy": Candidate(
        "Computes when the answer is copied, which is behind the worker's clock.",
        """
        out = torch.zeros(len(x), 64, dtype=x.dtype, device=x.device)
        waiting[out.data_ptr()] = lambda: real(out, slowly(self, x))
        return out
        """,
        "its own clock says",
        by_clock=True,
        top="""
        import time
        waiting, real = {}, torch.Tensor.copy_

        def slowly(module, x):
            time.sleep(0.03)
            return module.right(x)

        def copy(self, other, *args, **kwargs):
            compute = waiting.pop(other.data_ptr(), None) if isinstance(other, torch.Tensor) else None
            if compute:
                with torch.inference_mode(other.is_inference()):
                    compute()
            return real(self, other, *args, **kwargs)

        torch.Tensor.copy_ = copy
        """,
    ),
    "sleeping_thread": Candidate(
        "Returns memory that a thread fills after the call has returned.",
        """
        def work():
            time.sleep(0.05)
            with torch.no_grad():
                out.copy_(self.right(x))

        out = torch.zeros(len(x), 64, dtype=x.dtype, device=x.device)
        threading.Thread(target=work).start()
        return out
        """,
        "the Model's",
        top="import threading\nimport time\n",
    ),
    # ---- others' business
    "autocast_for_everyone": Candidate(
        "Turns autocast on.",
        "out = self.right(x)\ntorch.set_autocast_enabled('cpu', True)\nreturn out",
        "changes autocast",
    ),
    "tf32_for_everyone": Candidate(
        "Allows TF32 for everyone.",
        rejected="changes torch.backends.cudnn.allow_tf32",
        top="torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32\n",
    ),
    "tf32_by_the_old_name": Candidate(
        "The same by the older name.",
        rejected="changes the float32 matmul precision",
        top="torch.set_float32_matmul_precision('high')\n",
    ),
    "function_mode": Candidate(
        "Leaves a mode on that sees every call of PyTorch.",
        rejected="changes the torch function modes",
        top="from torch.overrides import BaseTorchFunctionMode\nBaseTorchFunctionMode().__enter__()\n",
    ),
    "global_hook": Candidate(
        "A hook on every module's forward.",
        rejected="changes the hooks on all modules",
        top="nn.modules.module.register_module_forward_hook(lambda module, args, out: None)\n",
    ),
    "traces_every_call": Candidate(
        "A trace function slows all Python down.",
        rejected="changes the trace or profile function",
        top="import sys\nsys.settrace(lambda *args: None)\n",
    ),
    "default_dtype": Candidate(
        "Leaves another default dtype.",
        rejected="changes the default dtype",
        top="torch.set_default_dtype(torch.float64)\n",
    ),
    "one_thread": Candidate(
        "Leaves one thread to everybody.",
        "torch.set_num_threads(torch.get_num_threads() % 2 + 1)\nreturn self.right(x)",
        "changes the number of threads",
    ),
    # ---- the process
    "hangs": Candidate(
        "Never returns.", "while True:\n    time.sleep(1)", "it hangs", top="import time\n", timeout=3.0
    ),
    "hangs_at_import": Candidate(
        "Never comes to an end at import.",
        rejected="it hangs",
        top="import time\nwhile True:\n    time.sleep(1)\n",
        timeout=0.5,
    ),
    "crashes": Candidate(
        "Reads address 0.", "return ctypes.string_at(0)", "ended its process by signal SIGSEGV", top="import ctypes\n"
    ),
    "exits": Candidate(
        "Leaves the process, with the exit code of the right ones.",
        "sys.exit(0)",
        "raised SystemExit: 0",
        top="import sys\n",
    ),
    "ends_the_process": Candidate(
        "Ends the process at once.", "os._exit(0)", "ended its process with exit code 0", top="import os\n"
    ),
    "writes_into_the_pipe": Candidate(
        "Writes a verdict into every pipe it has.",
        """
        for fd in os.listdir("/proc/self/fd"):
            try:
                int(fd) > 2 and os.write(int(fd), b"ok" * 64)
            except OSError:
                pass
        return self.right(x)
        """,
        "into the pipe of its answers",
        top="import os\n",
    ),
    "goes_on_in_another_session": Candidate(
        "Starts a process in a session of its own, which keeps a core busy while others are timed.",
        """
        if not self.started:
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            self.started = [subprocess.Popen(command, start_new_session=True)]
        return self.right(x)
        """,
        "starts a process in a session of its own",
        init="self.started = []",
        top="import subprocess\nimport sys\n",
    ),
    # ---- honest, and those whose trick gains nothing
    "plain": Candidate("The Model's operations, in PyTorch's own functions."),
    "compiled": Candidate(
        "torch.compile around the forward.", "return self.compiled(x)", init="self.compiled = torch.compile(self.right)"
    ),
    "in_place": Candidate(
        "Writes over its own temporaries, never over an input.",
        """
        if torch.is_grad_enabled():
            return self.right(x)
        h = self.matmul(x)
        h.mul_(torch.sigmoid(h)).add_(self.bias)
        return self.group_norm(h)
        """,
    ),
    "other_summation_order": Candidate(
        "Sums in another order: the product in four parts, the moments by hand.",
        """
        parts = zip(x.chunk(4, 1), self.matmul.weight.chunk(4, 1))
        h = sum(part @ weight.t() for part, weight in parts) + self.matmul.bias
        h = (F.silu(h) + self.bias).unflatten(1, (self.group_norm.num_groups, -1))
        centred = h - h.mean(2, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(2, keepdim=True) + self.group_norm.eps)
        return normed.flatten(1) * self.group_norm.weight + self.group_norm.bias
        """,
    ),
    "own_function": Candidate(
        "An autograd.Function with a backward of its own, as a kernel file has.",
        "return self.group_norm(SwishAndBias.apply(self.matmul(x), self.bias))",
        top="""
class SwishAndBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias):
        ctx.save_for_backward(h)
        return h * torch.sigmoid(h) + bias

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        s = torch.sigmoid(h)
        return g * (s + h * s * (1 - s)), g.sum(0)
""",
    ),
    "other_last_bits": Candidate(
        "The last bits change from call to call, as with atomic additions.",
        "out = self.right(x)\nreturn out + (out * 6e-8 * (time.monotonic_ns() // 1000 % 2)).detach()",
        top="import time\n",
    ),
    "pickled_before": Candidate(
        "Was pickled, copied and saved before.",
        init="""
        import copy, io, pickle
        pickle.dumps(torch.rand(3))
        copy.deepcopy(self)
        torch.save(self.bias, io.BytesIO())
        """,
    ),
    "slower_rivals": Candidate(
        "Slows down, in its own process, what a Model is made of: gains nothing.",
        """
        norm = self.group_norm
        return F.group_norm(F.silu(self.matmul(x)) + self.bias, norm.num_groups, norm.weight, norm.bias, norm.eps)
        """,
        top="""
        import time
        nn.GroupNorm.forward = lambda self, x: time.sleep(0.1)
        """,
    ),
    "busy_thread": Candidate(
        "A thread keeps a core busy, while the process is not stopped: gains nothing.",
        init="""
        import threading
        threading.Thread(target=lambda: [time.sleep(1e-4) for _ in iter(int, 1)], daemon=True).start()
        """,
        top="import time\n",
    ),
    "a_slice": Candidate("The Model's output is a slice.", model=SLICED),
    "expanded_output": Candidate(
        "The Model's output is expanded.", model=any_model("x.mean(1, keepdim=True).expand(-1, 5)")
    ),
    "transposed_output": Candidate(
        "The Model's output is a view, transposed.", model=any_model("x.view(-1, 8, 8).transpose(1, 2)")
    ),
    "complex_output": Candidate(
        "The Model's output is complex.",
        model=any_model("torch.fft.rfft(x * self.w)", init="self.w = nn.Parameter(torch.rand(64))"),
    ),
    "several_outputs": Candidate(
        "Outputs of several types.",
        model=any_model("(self.l(x), {'index': x.argmax(1), 'number': 3})", init="self.l = nn.Linear(64, 8)"),
    ),
    "batch_norm": Candidate(
        "Running means.",
        model=any_model("self.norm(x).relu()", "torch.rand(batch_size, 4, 8, 8)", "self.norm = nn.BatchNorm2d(4)"),
    ),
    "dropout": Candidate(
        "Random in training mode.",
        model=any_model("F.dropout(self.l(x), 0.5, self.training)", init="self.l = nn.Linear(64, 8)"),
    ),
    "an_embedding": Candidate(
        "Inputs that are indices.",
        model=any_model("self.t(x)", "torch.randint(0, 50, (batch_size, 64))", "self.t = nn.Embedding(50, 8)"),
    ),
    "refuses_some_values": Candidate(
        "A Model for values that are not below zero.", model=any_model("x.sqrt() if x.min() >= 0 else [][0]")
    ),
    "instance_norm": Candidate("InstanceNorm2d with parameters.", model=NORM),
}
