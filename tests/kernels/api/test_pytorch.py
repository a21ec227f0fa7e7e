"""torch's own attention functions on fly: what they compute is what fly's functions do, and it can be taken back.

Kernels give the same bits every time, so that another way to the same kernels has equal results; those of fly's
functions are held against references elsewhere. What differs between the two, layouts, masks, which causal is meant,
is held against torch's own mathematics in float64.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

import fly_attention
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.flash_attn_api import flash_attn_func, flash_attn_varlen_func
from kernels.integrations import pytorch
from tests.kernels.gradient_reference import Gradients
from tests.kernels.reference import SLACK, max_difference

registry = torch.nn.attention
ATEN = torch.ops.aten
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
# inductor needs a C++ compiler for CPU tensors
compilers = pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=GPU)]
)
varlen_attn = varlen.varlen_attn
VARLEN = inspect.signature(varlen_attn).parameters
# torch 2.11 has neither grouped heads nor pages here
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN else {}
FLASH = SDPBackend.FLASH_ATTENTION


@pytest.fixture(autouse=True)
def active(device, emulate):
    torch.compiler.reset()
    if device == "cpu":
        emulate("gfx950", "generic")
    fly_attention.activate(device)
    yield
    fly_attention.deactivate()


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def random(seed, device):
    torch.manual_seed(seed)
    return lambda *shape: torch.randn(shape, device=device).bfloat16().requires_grad_()


def dense(random, queries: int = 9, keys: int = 9, head_dim: int = 32) -> list[torch.Tensor]:
    """q, k, v (B, H, S, D)."""
    return [random(2, h, s, head_dim) for h, s in ((4, queries), (2, keys), (2, keys))]


def packed(random) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v (total, H, D) of lengths 5, 0 and 6, and their offsets."""
    leaves = [random(11, h, 32) for h in (4, 2 if GROUPED else 4, 2 if GROUPED else 4)]
    return leaves, torch.tensor([0, 5, 5, 11], dtype=torch.int32, device=leaves[0].device)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, leaves, weights)


def equal(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_math(leaves, out, hidden=None, bias=None):
    """The tolerance rules for out and for each gradient, against the same mathematics in float64 and bfloat16.

    hidden: True where a query does not see a key; bias: added to the scores.
    """

    def mathematics(dtype):
        wide = [x.detach().to(dtype).requires_grad_() for x in leaves]
        q, k, v = wide[0], *(x.repeat_interleave(2, 1) for x in wide[1:])
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias.to(dtype)
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        return gradients(torch.softmax(scores, -1) @ v, wide)

    exact, plain = mathematics(torch.float64), mathematics(torch.bfloat16)
    found = gradients(out, leaves)
    assert max_difference(found[0], exact[0]) <= 2 * max_difference(plain[0], exact[0]) + SLACK
    assert not Gradients(exact[1:], plain[1:], slack=2.0).wrong(found[1:])


@devices
@pytest.mark.parametrize("head_dim", [32, 20])
def test_sdpa_is_flys_function(random, device, head_dim):
    leaves = dense(random, head_dim=head_dim)
    with sdpa_kernel(FLASH):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=0.2)
    own = flash_attn_func(*(x.transpose(1, 2) for x in leaves), causal=True, softmax_scale=0.2).transpose(1, 2)
    assert equal(gradients(out, leaves), gradients(own, leaves))


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5)])
def test_causal_is_top_left(random, queries, keys):
    leaves = dense(random, queries, keys)
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    check_math(leaves, out, hidden=torch.ones(queries, keys).triu(1).bool())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(random, kind):
    leaves = dense(random)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask[..., 0] = True
    mask = mask if kind == "bool" else torch.randn(9, 9).bfloat16()
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    check_math(leaves, out, **({"bias": mask} if kind == "float" else {"hidden": ~mask}))


@devices
def test_layouts_of_results_are_those_that_compilers_count_on(random, device):
    q, k, v = dense(random)
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        real = ATEN._scaled_dot_product_flash_attention(x, k, v)
        meta = ATEN._scaled_dot_product_flash_attention(*(t.to("meta") for t in (x, k, v)))
        tensors = [(a, b) for a, b in zip(real, meta) if torch.is_tensor(a)]
        assert len(tensors) == 5
        assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in tensors)
        assert real[4:6] == meta[4:6] == (9, 9)


def test_layouts_of_results_of_cpu_tensors(random):
    q, k, v = (x.detach() for x in dense(random))
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    real = [out, lse, *ATEN._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, lse, 0.0, False)]
    q, k, v = (x.to("meta") for x in (q, k, v))
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    meta = [out, lse, *ATEN._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, lse, 0.0, False)]
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in meta]


@compilers
def test_compiled_sdpa_has_the_eager_results(random, device, backend):
    leaves = dense(random)

    def step(*leaves):
        with sdpa_kernel(FLASH):
            return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert equal(gradients(compiled(*leaves), leaves), gradients(step(*leaves), leaves))


@devices
def test_dropout_is_torchs_generators(random, device):
    q, k, v = leaves = dense(random)

    def step():
        torch.manual_seed(3)
        out, *_, state, _, _ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.5)
        assert state.dtype == torch.uint64
        return gradients(out, leaves)

    torch.manual_seed(3)
    own = flash_attn_func(*(x.transpose(1, 2) for x in leaves), dropout_p=0.5).transpose(1, 2)
    assert equal(step(), gradients(own, leaves))


@devices
@pytest.mark.parametrize(("window", "causal"), [((-1, 0), True), ((2, 0), True)])
def test_varlen_is_flys_function(random, device, window, causal):
    leaves, offsets = packed(random)
    options = {"return_aux": varlen.AuxRequest(lse=True), "window_size": window, "scale": 0.2} | GROUPED
    out, lse = varlen_attn(*leaves, offsets, offsets, 6, 6, **options)
    given = {"causal": causal, "window_size": window, "softmax_scale": 0.2, "return_attn_probs": True}
    own, own_lse, _ = flash_attn_varlen_func(*leaves, offsets, offsets, 6, 6, **given)
    assert equal(gradients(out, leaves), gradients(own, leaves)) and torch.equal(lse, own_lse)


@compilers
def test_compiled_varlen_has_the_eager_results(random, device, backend):
    leaves, offsets = packed(random)

    def step(*leaves):
        return varlen_attn(*leaves, offsets, offsets, 6, 6, window_size=(-1, 0), **GROUPED)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert equal(gradients(compiled(*leaves), leaves), gradients(step(*leaves), leaves))


@pytest.mark.skipif("block_table" not in VARLEN, reason="torch's varlen_attn has no pages")
@devices
@torch.no_grad()
def test_varlen_of_pages_into_out(random, device):
    (q, _, _), offsets = packed(random)
    pages = [random(5, 16, 2, 32) for _ in range(2)]
    table = torch.tensor([[3, 1], [0, 0], [4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 0, 31], dtype=torch.int32, device=device)
    options = {"seqused_k": lengths, "block_table": table, "enable_gqa": True}
    out = varlen_attn(q, *pages, offsets, None, 6, 32, **options)
    own = flash_attn_varlen_func(q, *pages, offsets, None, 6, 32, seqused_k=lengths, block_table=table)
    assert torch.equal(out, own)
    written = torch.full_like(q, torch.nan)
    result = varlen.varlen_attn_out(written, q, *pages, offsets, None, 6, 32, num_splits=2, **options)
    assert result is written and (written - own).abs().max() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("device", ["cuda"])  # torch has its mathematics alone for jagged tensors of a CPU
def test_jagged_tensors(random, device):
    offsets = torch.tensor([0, 5, 11], dtype=torch.int32, device=device)  # torch takes no empty sequences here
    leaves = [random(11, 4, 32) for _ in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaves)
    with sdpa_kernel(FLASH):
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()
    own = flash_attn_varlen_func(*leaves, offsets, offsets, 6, 6)
    assert equal(gradients(out, leaves), gradients(own, leaves))


def test_another_implementation_takes_its_place_and_torchs_comes_back(random):
    wide = [x.float() for x in dense(random)]

    def is_flys() -> bool:
        """torch's own takes float32."""
        try:
            F.scaled_dot_product_attention(*wide, enable_gqa=True)
        except ArgumentTypeError:
            return True
        return False

    assert registry.current_flash_attention_impl() == "FLY_CPU" and is_flys()
    registry.register_flash_attention_impl("OTHER", register_fn=lambda: SimpleNamespace(remove=bool))
    registry.activate_flash_attention_impl("OTHER")
    assert not is_flys()
    fly_attention.deactivate()  # not its own, so that it stays
    assert registry.current_flash_attention_impl() == "OTHER"
    for name in ("_flash_attention_forward", "_scaled_dot_product_flash_attention"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")
    registry.activate_flash_attention_impl("FLY_CPU")
    assert is_flys()
    registry.restore_flash_attention_impl()
    assert not is_flys() and registry.current_flash_attention_impl() is None


def test_cuda_is_the_default():
    def keys() -> list[bool]:
        name = "aten::_flash_attention_backward"
        return [torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CUDA", "CPU")]

    cuda = torch.cuda.is_available()  # where torch has kernels of its own for it
    assert keys() == [cuda, True]
    fly_attention.activate()
    assert registry.current_flash_attention_impl() == "FLY" and keys() == [True, False]
    fly_attention.deactivate()
    assert registry.current_flash_attention_impl() is None and keys() == [cuda, False]


def test_mistakes_name_torchs_arguments(random):
    q, k, v = dense(random)
    with pytest.raises(ArgumentTypeError, match=r"torch's flash attention: query has dtype torch.float32"):
        F.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)
    with pytest.raises(UnsupportedError, match="return_debug_mask=True is not available: pass False"):
        ATEN._scaled_dot_product_flash_attention(q, k, v, return_debug_mask=True)
    with pytest.raises(
        UnsupportedError, match=r"dropout_p=0.5 is not available: the operation for CPU tensors keeps"
    ):
        ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.5)
    with pytest.raises(ArgumentError, match=r"query must have 4 dimensions, got shape \(4, 9, 32\)"):
        ATEN._scaled_dot_product_flash_attention(q[0], k[0], v[0])
    with pytest.raises(ArgumentError, match="num_splits must be at least 0, got -1"):
        ATEN._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, 9, 9, 0.0, False, False, num_splits=-1
        )
    with pytest.raises(ArgumentError, match="activate: device must be one of 'cuda', 'cpu', got 'tpu'"):
        fly_attention.activate("tpu")


def test_a_torch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(
        UnsupportedError, match=r"register_flash_attention_impl, which torch 2.6.0 does not have: use"
    ):
        fly_attention.activate()


def test_what_torch_has_no_operation_for_is_left_out(monkeypatch):
    fly_attention.deactivate()
    monkeypatch.setitem(pytorch._KERNELS["cpu"], "_flash_attention_of_tomorrow", print)
    fly_attention.activate("cpu")
    assert registry.current_flash_attention_impl() == "FLY_CPU"
