"""How calls reach their kernels: the binary of a launch, triton's launcher and the short way past it.

And how ops go past the dispatcher.

next: test_ops_kernels.py
"""

import functools
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from tmoe import ops
from tmoe.base import private_torch as stack
from tmoe.ops import exchange
from tmoe.ops.experts import op as mlp
from tmoe.ops.experts.op import trace
from tmoe.ops.launch import kernel_launch
from tmoe.ops.launch.eager import unwatched
from tmoe.ops.register import flat, taking
from tmoe.ops.router import topk
from tmoe.ops.router.product import router_product


def test_a_binary_is_found_by_all_that_it_depends_on(monkeypatch):
    """Triton asks the same of arguments; on AMD's GPUs also whether 32 bits reach the whole tensor."""
    small, large = (torch.empty(n, dtype=torch.bfloat16, device="meta") for n in (2**20, 2**30))

    def key(target, *args):
        monkeypatch.setattr(kernel_launch, "_target", target)
        return kernel_launch._key(args, [False] * len(args))[0]

    assert key("cuda:90", small) == key("cuda:90", large) != key("cuda:90", small.float())
    assert key("hip:gfx942", small) != key("hip:gfx942", large)
    shifted = torch.empty(9, dtype=torch.bfloat16)
    assert key("cuda:90", shifted[1:]) != key("cuda:90", shifted) != key("cuda:90", None)
    assert key("cuda:90", 5) != key("cuda:90", 6)
    assert (
        kernel_launch._key((5,), [True])[0]
        == kernel_launch._key((6,), [True])[0]
        != kernel_launch._key((2**31,), [True])[0]
    )


@pytest.mark.parametrize("capturing", [False, True])
def test_a_thread_has_a_context_before_its_first_launch(monkeypatch, capturing):
    """Asked for once in each thread.

    Not while a CUDA graph is captured, when CUDA refuses most questions.
    """
    asked, ran = [], []
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    args = torch.zeros(2, dtype=torch.int64), 0, 2, 2, True, True
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    key, _ = kernel_launch._key(args, kernel_launch._fixed(exchange.meet_kernel))
    monkeypatch.setitem(
        kernel_launch._binaries, (id(exchange.meet_kernel), 0, *key), lambda *_: ran.append(len(asked))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: [kernel_launch.launch(exchange.meet_kernel, (1,), *args) for _ in range(3)]
        )
        thread.start()
        thread.join()
    assert ran == ([0] * 6 if capturing else [1, 1, 1, 2, 2, 2])


NEWER = hasattr(nvidia, "wrap_handle_tensordesc_impl")  # triton 3.8
# where a C function's arguments hold the launch's metadata; the hooks stand behind it
METADATA = 8 if NEWER else 10
SWIZZLED = dict(elem_size=2, elem_type=10, fp4_padded=False)
META = [
    dict(swizzle=3, block_size=[64, 64], **SWIZZLED),
    dict(swizzle=2, block_size=[1, 1, 8, 32], **SWIZZLED),
]
SIGNATURE = dict(
    a="*bf16", b="tensordesc<bf16[64, 64]>", n="i32", c="tensordesc<bf16[1, 1, 8, 32]>", K="constexpr"
)


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA driver that is not there: what reached the C function, flat, and what became a tensor map."""
    handed, encoded = [], []

    def fill(*args):
        args = tuple(tuple(arg) if isinstance(arg, list | tuple) else arg for arg in args)
        encoded.append(args)
        return "map", args

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    driver = SimpleNamespace(utils=utils, allocate_default_profile_scratch=lambda *_: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return SimpleNamespace(handed=handed, encoded=encoded)


def binary(cuda, signature=SIGNATURE, meta=META):
    """A compiled kernel with triton's own launcher, whose C function writes down what it is given."""
    run = object.__new__(nvidia.CudaLauncher)
    run.launch_cooperative_grid = 0
    run.launch_pdl = 1
    run.num_ctas = 1
    run.gsan_enabled = False
    run.global_scratch_size = run.profile_scratch_size = run.global_scratch_align = (
        run.profile_scratch_align
    ) = 0
    if NEWER:
        run.arg_annotations = ["annotations"]
        run.kernel_signature = b"signature"

    def keep(*args):
        cuda.handed.append((*args[:-1], *args[-1]) if NEWER else args)

    c_function = functools.partial(keep)  # no Python function, as triton's is none
    run.launch = nvidia.wrap_handle_tensordesc(c_function, signature, meta)
    compiled = object.__new__(CompiledKernel)
    compiled._run = run
    compiled.module = None
    compiled.function = 7
    compiled.packed_metadata = (8, 1, 0)
    compiled._init_handles = lambda: None
    compiled.launch_metadata = lambda *_: "facts"
    return compiled


def test_the_short_way_to_a_launch_hands_over_what_tritons_own_does(monkeypatch, cuda):
    """Descriptors among other arguments, in any number.

    A map is encoded once for each address, sizes and strides; hooks are called.
    """
    handed = cuda.handed
    encoded = cuda.encoded
    heard = []
    t, u = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)

    def both_ways(compiled, values):
        short = kernel_launch.launcher(compiled, None, values)
        before = len(encoded)
        assert hasattr(short, "parts") and not handed  # asking launches nothing
        short((3, 2, 1), 99, values)
        short((3, 2, 1), 99, values)
        # the second found them
        assert len(encoded) - before == sum(isinstance(v, kernel_launch.Descriptor) for v in values)
        natives = [kernel_launch._native(v, None) for v in values]
        compiled.run(3, 2, 1, 99, compiled.function, compiled.packed_metadata, None, None, None, *natives)
        first, second, own = handed[-3:]
        assert first == second == own
        handed.clear()
        return short

    described = kernel_launch.describe(t, [64, 64]), kernel_launch.describe_ragged(u, [8, 32])
    compiled = binary(cuda)
    short = both_ways(compiled, [t.data_ptr(), described[0], 5, described[1], 16])
    box = len(short.parts[1]) + 5  # where the first map stands
    before = len(encoded)
    short((1, 1, 1), 0, [0, kernel_launch.describe(t[:128], [64, 64]), 5, described[1], 16])
    assert len(encoded) == before + 1 and encoded[-1][5] == (128, 128)
    other = t.clone()
    turned = t.view(128, 256)[:, :128]
    for there, stride in ((other, (128, 1)), (other, (128, 1)), (turned, (256, 1))):
        described_there = kernel_launch.Descriptor(there, (128, 128), stride, [64, 64])
        short((1, 1, 1), 0, [0, described_there, 5, described[1], 16])
        assert handed[-1][box][1][0] == there.data_ptr() and handed[-1][box][1][6] == stride
    assert len(encoded) == before + 3
    monkeypatch.setattr(kernel_launch, "MAPS", 2)
    for rows, new in ((192, 1), (64, 1), (192, 0), (256, 1)):  # the first and the last find no room
        before = len(encoded)
        short((1, 1, 1), 0, [0, kernel_launch.describe(t[:rows], [64, 64]), 5, described[1], 16])
        assert len(encoded) == before + new and handed[-1][box][1][5] == (rows, 128)
    handed.clear()
    both_ways(binary(cuda, dict(a="*bf16", n="i32"), None), [t.data_ptr(), 5])

    hook = lambda metadata: heard.append(metadata)  # noqa: E731
    runtime = triton.knobs.runtime
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        monkeypatch.setattr(chain, "calls", [hook])
    values = [0, described[0], 5, described[1], 16]
    short((1, 1, 1), 0, values)
    assert handed[-1][METADATA] == "facts" and handed[-1][METADATA + 1] is runtime.launch_enter_hook
    for enter, given in ((hook, hook), (None, None)):  # triton takes these as well
        monkeypatch.setattr(runtime, "launch_enter_hook", enter)
        monkeypatch.setattr(runtime, "launch_exit_hook", None)
        short((1, 1, 1), 0, values)
        assert handed[-1][METADATA + 1 : METADATA + 3] == (given, None)


def more_arguments(run):
    """One more argument for the C function, in front."""
    inner = run.launch
    run.launch = lambda *args: inner("new", *args)


def another_order(run):
    inner = run.launch
    run.launch = lambda *args: inner(*args[:5], args[6], args[5], *args[7:])


def no_options(run):
    del run.launch_pdl


def another_encoder(monkeypatch):
    monkeypatch.setattr(
        nvidia, "make_tensordesc_arg", lambda arg, metadata, device, plan: ["map", *arg.shape]
    )


@pytest.mark.parametrize("change", [more_arguments, another_order, no_options, another_encoder])
def test_a_strangers_launcher_launches_itself(monkeypatch, caplog, cuda, change):
    """Whatever it changed, triton launches, with descriptors of its own kind, and one note says so."""
    stack.note.cache_clear()
    t, u = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
    values = [
        t.data_ptr(),
        kernel_launch.describe(t, [64, 64]),
        5,
        kernel_launch.describe_ragged(u, [8, 32]),
        16,
    ]
    ran = []
    for _ in range(2):
        compiled = binary(cuda)
        change(monkeypatch if change is another_encoder else compiled._run)
        monkeypatch.setattr(
            CompiledKernel,
            "__getitem__",
            lambda self, grid: lambda *args, stream: ran.append((grid, stream, *args)),
        )
        way = kernel_launch.launcher(compiled, None, values)
        assert not hasattr(way, "parts")
        way((3, 2, 1), 99, values)
    assert not cuda.handed and len(ran) == 2 and ran[0] == ran[1]
    grid, stream, address, box, five, ragged, last = ran[0]
    assert (grid, stream, address, five, last) == ((3, 2, 1), 99, t.data_ptr(), 5, 16)
    assert isinstance(box, TensorDescriptor) and box.base is t and isinstance(ragged, TensorDescriptor)
    assert [r.getMessage().count("launcher is unknown") for r in caplog.records] == [1]


def test_another_gpus_launcher_is_left_to_itself(caplog):
    ran = []

    class Compiled(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *args, stream: ran.append((grid, stream, *args))

    kernel_launch.launcher(Compiled(run=lambda: None), None, [1, 2])((3, 2, 1), 99, [1, 2])
    assert ran == [((3, 2, 1), 99, 1, 2)] and not caplog.records


def test_gluon_without_what_hoppers_kernels_use(monkeypatch, caplog):
    """Gluon is experimental, so a name may be gone.

    Kernels that any GPU runs then take their place, and a note says so.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    from tmoe.ops.experts import gluon_names

    assert kernel_launch.gluon_lacks() == "" and kernel_launch._has_descriptors("cuda:90")
    stack.note.cache_clear()
    kernel_launch.gluon_lacks.cache_clear()
    monkeypatch.delattr(tma, "store_wait")
    monkeypatch.setattr(gluon_names, "bulk_load", None)
    try:
        assert not kernel_launch._has_descriptors("cuda:90") and not kernel_launch._has_descriptors("cuda:90")
        assert not kernel_launch._has_descriptors("cuda:80")
        (record,) = caplog.records
        assert "has no bulk_load of Gluon, " in record.getMessage()
        assert "tma.store_wait: portable kernels" in record.getMessage()
        names = []
        with kernel_launch.compile_only("cuda:90", lambda name, key, compile: names.append(name)):
            trace(512, 128, 128, 4, 2, torch.bfloat16)
        assert "up_kernel" in names and not {"specialised", "few_rows"} & {*names}
    finally:
        kernel_launch.gluon_lacks.cache_clear()


# ---- arguments as one value


class Call(NamedTuple):
    x: torch.Tensor
    bias: torch.Tensor | None
    rows: int
    scale: float
    keep: bool
    group: str


def test_an_ops_schema_is_its_named_tuples():
    arguments = "(Tensor x, Tensor? bias, SymInt rows, float scale, bool keep, str group)"
    assert flat(Call, 1) == f"{arguments} -> Tensor"
    assert flat(Call, 2) == f"{arguments} -> (Tensor, Tensor)"
    assert flat("(Tensor x) -> Tensor", 5) == "(Tensor x) -> Tensor"
    given = (torch.zeros(1), None, 3, 0.5, True, "g")
    assert taking(Call, lambda call: call)(*given) == Call(*given)
    assert taking("", lambda *flat: flat)(*given) == given


# ---- past the dispatcher in eager mode


@pytest.fixture
def straight(monkeypatch):
    """The way that a GPU's tensors take, with the CPU's kernels behind it; returns how often it was taken."""
    taken = []

    for module in (mlp, topk):
        monkeypatch.setattr(
            module, "unwatched", lambda *tensors: taken.append(tensors) or unwatched(*tensors)
        )
        run = taking(getattr(module, "MlpCall", ""), module._forward_cpu)
        run_backward = taking(getattr(module, "MlpBackward", ""), module._backward_cpu)
        monkeypatch.setattr(module._Straight, "run", run)
        monkeypatch.setattr(module._Straight, "run_backward", run_backward)
    return taken


def through(*args, how, use):
    """What `use` finds in y of a layer behind its router, by the gradients of all.

    `how`: moe_mlp and softmax_topk.
    """
    x, logits, gate_up, down, bias = leaves = [
        None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in args
    ]
    moe_mlp, softmax_topk = how
    weights, ids = softmax_topk(logits, 2, True)
    return use(
        moe_mlp(x, gate_up, down, weights, ids, bias),
        [t for t in leaves if t is not None and t.requires_grad],
    )


def grads(y, leaves):
    if leaves:
        y.sin().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)]


def batched(y, leaves):
    return torch.autograd.grad(y, leaves, torch.stack([y.cos(), y]).detach(), is_grads_batched=True)


class Swallow(torch.autograd.Function):
    """Tells nothing of what came."""

    @staticmethod
    def forward(ctx, y):
        ctx.set_materialize_grads(False)
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def unused(y, leaves):
    Swallow.apply(y).sum().backward()
    return [t.grad for t in leaves]


def counted(y, leaves):
    """How many of our ops a mode around the backward alone sees."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        ours = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ours += "tmoe" in str(func)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        y.sum().backward()
    return [torch.tensor(count.ours), *(t.grad for t in leaves)]


@pytest.mark.parametrize("use", [grads, batched, unused, counted], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "frozen, biased, T", [((), True, 7), ((0,), False, 7), ((1,), True, 7), ((2, 4), True, 7), ((), True, 0)]
)
def test_the_straight_way_gives_what_the_registered_op_gives(straight, use, frozen, biased, T):
    args = [
        torch.randn(T, 16),
        torch.randn(T, 4),
        torch.randn(4, 24, 16),
        torch.randn(4, 16, 12),
        torch.randn(4, 24),
    ]
    args = [t.requires_grad_(i not in frozen) for i, t in enumerate(args)]
    args[4] = args[4] if biased else None

    def direct(*a):
        needs = any(t is not None and t.requires_grad for t in a)
        return mlp._Straight.apply(*a, *mlp.NO_CODES, "swiglu", 2 * T, needs)

    got = through(*args, how=(direct, topk._Straight.apply), use=use)
    want = through(*args, how=(ops.moe_mlp, ops.softmax_topk), use=use)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_the_straight_way_without_gradients(straight):
    args = torch.randn(7, 16), torch.randn(7, 4), torch.randn(4, 24, 16), torch.randn(4, 16, 12), None
    direct = lambda *a: mlp._Straight.apply(*a, *mlp.NO_CODES, "swiglu", 14, False)  # noqa: E731
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            (got,) = through(*args, how=(direct, topk._Straight.apply), use=grads)
            (want,) = through(*args, how=(ops.moe_mlp, ops.softmax_topk), use=grads)
            assert torch.equal(got, want) and not got.requires_grad
    assert not topk._Straight.apply(args[1].requires_grad_(), 2, True)[1].requires_grad


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", ["straight", "registered", "layer", "layer, straight", "grouped", "router"])
def test_a_second_derivative_is_refused(straight, way, named, summed):
    """A kernel has none: a call that went on without it would give a wrong number."""
    x, logits = torch.randn(7, 16, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    gate_up, down = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    topk_of = {"straight": topk._Straight.apply, "registered": ops.softmax_topk}
    if way in topk_of:
        of = logits
        y = topk_of[way](logits, 2, True)[0][:, 0]
    elif way == "router":
        of = torch.randn(7, 16, dtype=torch.bfloat16, requires_grad=True)
        y = router_product(of, torch.randn(4, 16, dtype=torch.bfloat16))
    elif way == "grouped":
        of = x
        y = ops.grouped_mm(x, gate_up, torch.tensor([1, 2, 2, 7], dtype=torch.int32))
    else:
        args = x, gate_up, down, torch.rand(7, 2), torch.randint(0, 4, (7, 2))
        of = x
        y = (
            mlp._Straight.apply(*args, *(None,) * 3, "swiglu", 14, True)
            if "straight" in way
            else ops.moe_mlp(*args)
        )
    (first,) = torch.autograd.grad(y.sum() if summed else y.square().sum(), of, create_graph=True)
    loss = first.square().sum() + of.sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, of) if named else loss.backward()


def test_who_watches():
    """Each of these sees the registered op.

    A compiler, a dispatch mode, a functional transform and a tensor of a class of its own.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Mine(torch.Tensor):
        pass

    x = torch.randn(3)
    seen = []
    assert unwatched(x, None, torch.nn.Parameter(x))
    assert not unwatched(x.as_subclass(Mine)) and not unwatched(x, x.as_subclass(Mine))
    with Mode():
        assert not unwatched(x)
    torch.func.vmap(lambda t: seen.append(unwatched(x)) or t)(x)
    assert seen == [False]
    assert torch.equal(torch.compile(lambda t: t + unwatched(t), fullgraph=True, backend="eager")(x), x)


def test_a_gpus_tensors_alone_go_straight(straight):
    """On a CPU the registered op is all there is."""
    args = (
        torch.randn(7, 16),
        torch.randn(4, 24, 16),
        torch.randn(4, 16, 12),
        torch.rand(7, 2),
        torch.zeros(7, 2).int(),
    )
    ops.moe_mlp(*args), ops.softmax_topk(torch.randn(7, 4), 2, True)
    assert not straight
