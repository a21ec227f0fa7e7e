"""Gradients where torch traces or recomputes: compilers, checkpointing, and the operations behind them.

Kernels give the same bits every time, so that whatever goes another way to the same kernels has equal results; eager
gradients are held against the reference elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fly.errors import UnsupportedError
from kernels import flash_attn_api as api
from kernels.api import torch_ops
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.backward.test_api_gradients import FUNCTIONS
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import gradients

OPS = torch.ops.fly
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# inductor needs a C++ compiler for CPU tensors
devices = pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=GPU)]
)


@pytest.fixture(autouse=True)
def gfx950(emulate):
    torch.compiler.reset()
    emulate("gfx950", "generic")


def small(seed: int, device: str = "cpu", *, lengths: tuple[int, ...] | None = None, head_dim: int = 32) -> Inputs:
    """One sequence of 5 queries and 9 keys, or packed ones of `lengths`."""
    sizes = {"queries": [5], "keys": [9]} if lengths is None else {"queries": [*lengths], "keys": [*lengths]}
    packed = lengths is not None
    return Inputs(**sizes, heads=2, kv_heads=2, head_dim=head_dim, packed=packed, seed=seed, device=device)


def call_of(name: str, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(leaves, options) of one of FlashAttention's functions."""
    q, k, v = inputs.tensors()
    if "qkvpacked" in name:
        leaves = [torch.stack([q, k[..., : q.shape[-3], :, :], v[..., : q.shape[-3], :, :]], -3)]
    else:
        leaves = [q, torch.stack([k, v], -3)] if "kvpacked" in name else [q, k, v]
    options: dict[str, Any] = {"causal": True, "window_size": (6, -1)}
    if inputs.packed:
        offsets, longest = inputs.form()["cu_seqlens_q"], max(inputs.queries)
        if "qkvpacked" in name:
            options |= {"cu_seqlens": offsets, "max_seqlen": longest}
        else:
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest}
            options |= {"max_seqlen_k": longest}
    return leaves, options


def step(function: Any, leaves: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    """out, lse and the gradients of a loss of both."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse, _ = function(*leaves, return_attn_probs=True, **options)
    generator = torch.Generator(out.device).manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator, device=out.device).to(x.dtype) for x in (out, lse))
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [dout, dlse])


def equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@devices
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_functions_have_the_eager_gradients(name, device, backend, seed):
    inputs = small(seed, device, lengths=(5, 0, 3) if "varlen" in name else None)
    leaves, options = call_of(name, inputs)
    function = getattr(api, name)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert equal(step(compiled, leaves, **options), step(function, leaves, **options)), f"seed {seed}"


@devices
def test_dynamic_shapes_have_gradients_without_compiling_again(device, backend, seed):
    function = api.flash_attn_varlen_qkvpacked_func
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for lengths, stance in (((3, 5, 1), "default"), ((7, 4), "fail_on_recompile")):
        leaves, options = call_of("varlen_qkvpacked", small(seed, device, lengths=lengths))
        with torch.compiler.set_stance(stance):
            found = step(compiled, leaves, **options)
        assert equal(found, step(function, leaves, **options)), f"seed {seed}"


@devices
def test_compiled_gradients_of_a_bias_are_the_eager_ones(device, backend, seed):
    inputs = small(seed, device)
    tensors = (*inputs.tensors(), inputs.floats(2, 1, 9))

    def by(function: Any) -> tuple[torch.Tensor, ...]:
        def loss(q: Any, k: Any, v: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = function(q, k, v, True, bias=bias, return_lse=True)
            return out.float().square().sum(), lse.sum()

        if function is OPS.flash_attn:
            loss = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(loss(*leaves), leaves)

    for found, expected in zip(by(OPS.flash_attn), by(flydsl_flash_attn_func), strict=True):
        # on a GPU, sums by atomic additions have no order
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if device == "cpu" else 1e-4)


def test_a_sink_alone_may_need_a_gradient(seed):
    leaves, options = call_of("flash_attn_func", small(seed))
    sink = small(seed).floats(2).requires_grad_()

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return api.flash_attn_func(*leaves, learnable_sink=sink, **options).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(function(*leaves), sink) for function in (compiled, loss))
    assert expected[0].any() and equal(found, expected), f"seed {seed}"


def test_the_graph_of_a_stacked_gradient_is_one_operation(seed):
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    leaves, _ = call_of("qkvpacked", small(seed))
    leaf = leaves[0].requires_grad_()
    compiled = torch.compile(
        api.flash_attn_qkvpacked_func, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    compiled(leaf).sum().backward()
    _, backward = graphs
    computing = [name for name in backward if name.startswith(("aten", "fly"))]
    assert {*computing} - {"aten.expand.default", "aten.detach.default"} == {"fly.flash_attn_backward.default"}
    assert computing.count("fly.flash_attn_backward.default") == 1


def test_stacked_tensors_get_their_gradient_without_a_copy(seed):
    for name in FUNCTIONS:
        leaves, options = call_of(name, small(seed, lengths=(5, 3) if "varlen" in name else None))
        leaves = [x.requires_grad_() for x in leaves]
        behind = [node for node, _ in getattr(api, name)(*leaves, **options).grad_fn.next_functions if node]
        # nothing is between the backward pass and what the caller has
        assert [node.variable for node in behind] == leaves


OPERATIONS = {
    "dense": ((2, 4, 2, 32), (2, 5, 1, 32), (2, 5, 1, 32)),
    "qkv of packed sequences": ((7, 3, 2, 32), None, None),
}


def operation(name: str, seed: int) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        None if shape is None else torch.randn(shape, generator=generator).bfloat16() for shape in OPERATIONS[name]
    ]
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    return [*tensors, True], packed if "packed" in name else {}


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck_with_gradients(name, seed):
    arguments, options = operation(name, seed)
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if options:  # it takes seconds, and compiled functions are tested above
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.flash_attn.default, leaves, options | {"return_lse": True}, test_utils=checks)


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck_of_the_backward_operation(name, seed):
    arguments, options = operation(name, seed)
    out, lse = OPS.flash_attn(*arguments, **options, return_lse=True)
    given = (torch.randn_like(out), torch.randn_like(lse) if options else None, out, lse, [])
    torch.library.opcheck(OPS.flash_attn_backward.default, (*given, *arguments), options)


def test_compiled_gradients_of_tensors_that_lie_differently(seed):
    """196 tokens, as of a picture's patches: q with heads outside of tokens, k a part of something wider."""
    inputs = Inputs([196], [196], heads=1, kv_heads=1, head_dim=32, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([k, k], -1)[..., :32]

    def step(*given: torch.Tensor) -> torch.Tensor:
        return api.flash_attn_func(*given) * 1.0

    def by(function: Any) -> tuple[torch.Tensor, ...]:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*given), given, dout)

    found = by(torch.compile(step, fullgraph=True, backend="aot_eager"))
    assert equal(found, by(step)), f"seed {seed}"
    assert not gradients(q, k, v, False, dout).wrong(found), f"seed {seed}"


@pytest.mark.parametrize("part", ["out", "lse"])
def test_compiled_losses_of_one_result(part, seed):
    leaves, _ = call_of("flash_attn_func", small(seed))

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        out, lse, _ = api.flash_attn_func(*leaves, return_attn_probs=True)
        return (out if part == "out" else lse).float().square().sum()

    def by(function: Any) -> tuple[torch.Tensor, ...]:
        given = [x.detach().requires_grad_() for x in leaves]
        return torch.autograd.grad(function(*given), given)

    assert equal(by(torch.compile(loss, fullgraph=True, backend="aot_eager")), by(loss)), f"seed {seed}"


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """A name for every forward call that is launched."""
    found: list[str] = []
    original = torch_ops.flydsl_flash_attn_func

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append("forward")
        return original(*arguments, **options)

    monkeypatch.setattr(torch_ops, "flydsl_flash_attn_func", counted)
    return found


def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    out, *more = api.flash_attn_func(q * 1.5, k, v, **options)
    return (out.sin(), *more)


SELECTIVE = partial(create_selective_checkpoint_contexts, [OPS.flash_attn.default])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("options", "calls"), [({}, 2), ({"context_fn": SELECTIVE}, 1)], ids=["all", "selective"])
def test_checkpointed_calls_have_the_same_gradients(options, calls, backend, launches, seed):
    leaves, given = call_of("flash_attn_func", small(seed))
    expected = step(block, leaves, **given)

    def checkpointed(*leaves: torch.Tensor, **given: Any) -> Any:
        return checkpoint(block, *leaves, use_reentrant=False, **options, **given)

    function = torch.compile(checkpointed, fullgraph=True, backend=backend) if backend else checkpointed
    launches.clear()
    assert equal(step(function, leaves, **given), expected), f"seed {seed}"
    assert len(launches) == calls


def test_gradients_of_a_compiled_gradient_are_refused(seed):
    (q, k, v), _ = call_of("flash_attn_func", small(seed))
    q.requires_grad_()
    compiled = torch.compile(api.flash_attn_func, fullgraph=True, backend="eager")
    (dq,) = torch.autograd.grad(compiled(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="it has no second derivative; detach it"):
        dq.sum().backward()


PAGES = {"block_table": torch.zeros(1, 1, dtype=torch.int32), "seqused_kv": torch.tensor([3], dtype=torch.int32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PAGES, "the backward pass does not do keys in pages"),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes requires a gradient, and has none"),
        ({"return_lse": False}, "return_lse is False where a gradient is needed: pass True"),
    ],
    ids=["pages", "slopes", "lse"],
)
def test_what_an_operation_has_no_gradient_of_is_refused_by_name(options, message, seed):
    (q, k, v), _ = call_of("flash_attn_func", small(seed))
    if "block_table" in options:
        k, v = k.new_zeros(1, 16, 2, 32), v.new_zeros(1, 16, 2, 32)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UnsupportedError, match=message):
        OPS.flash_attn(q.requires_grad_(), k, v, True, **{"return_lse": True, **options})


def test_refusals_while_compiling_are_in_the_callers_names(seed):
    (q, k, v), _ = call_of("flash_attn_func", small(seed))
    compiled = torch.compile(api.flash_attn_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="flash_attn_func: alibi_slopes requires a gradient, and has none"):
        compiled(q.requires_grad_(), k, v, alibi_slopes=torch.zeros(2, requires_grad=True))


def test_exported_programs_have_gradients(seed):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return api.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)

    leaves, _ = call_of("flash_attn_func", small(seed))
    program = torch.export.export(Attention(), tuple(x.requires_grad_() for x in leaves)).module()

    def call(*leaves: torch.Tensor, return_attn_probs: bool) -> Any:
        return program(*leaves)

    assert equal(step(call, leaves), step(api.flash_attn_func, leaves, causal=True)), f"seed {seed}"


def test_eager_gradients_go_past_the_operation(seed, monkeypatch):
    monkeypatch.setattr(torch_ops, "_run", None)
    monkeypatch.setattr(torch_ops, "_backward", None)
    leaves, options = call_of("flash_attn_func", small(seed))
    assert len(step(api.flash_attn_func, leaves, **options)) == 5


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_kvpacked_func"])
def test_deterministic_algorithms_may_be_asked_for(name, seed):
    leaves, options = call_of(name, small(seed, lengths=(5, 3) if "varlen" in name else None))
    function = getattr(api, name)
    expected = step(function, leaves, **options)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN then
    try:
        found = [step(function, leaves, deterministic=flag, **options) for flag in (False, True)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(equal(x, expected) for x in found), f"seed {seed}"


def test_saved_tensors_go_through_the_callers_hooks(seed):
    """Offloading: everything that a call keeps is autograd's to pack."""
    leaves, options = call_of("flash_attn_varlen_func", small(seed, lengths=(5, 3)))
    expected = step(api.flash_attn_varlen_func, leaves, **options)
    packed: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = step(api.flash_attn_varlen_func, leaves, **options)
    assert equal(found, expected), f"seed {seed}"
    assert len(packed) == 7  # q, k, v, out, lse and both offsets


def test_hooks_may_hand_back_tensors_that_lie_otherwise(seed):
    """Strides and alignment are those of the tensors that come back, whatever a call before had."""
    leaves, _ = call_of("flash_attn_func", small(seed))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    expected = step(api.flash_attn_func, turned)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        memory = x.new_empty(x.numel() + 1)
        return memory[1:].view(x.shape).copy_(x)

    for unpack in (lambda x: x.contiguous(), shifted, lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            found = step(api.flash_attn_func, turned)
        assert equal(found, expected), f"seed {seed}"


def test_a_tensor_changed_in_place_is_noticed(seed):
    (q, k, v), _ = call_of("flash_attn_func", small(seed))
    out = api.flash_attn_func(q.requires_grad_(), k, v)
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_fly_s_own_function_takes_stacked_tensors(seed):
    (qkv,), _ = call_of("qkvpacked", small(seed))
    q, k, v = qkv.unbind(2)
    expected = flydsl_flash_attn_func(q, k, v)
    assert torch.equal(flydsl_flash_attn_func(qkv, None, None), expected)
    assert torch.equal(flydsl_flash_attn_func(q, torch.stack([k, v], 2), None), expected)
