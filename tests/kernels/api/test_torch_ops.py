"""Flash attention as torch operations: what `opcheck` says of them, and what torch.compile and export make of it."""

from __future__ import annotations

import secrets

import pytest
import torch

from kernels import flash_attn_api as api
from kernels.api import torch_ops
from kernels.cache.kv_cache import append_to_cache
from kernels.integrations import vllm
from kernels.problem.catalogue import DESCALES
from tests.kernels import fp8_reference
from tests.kernels.api.api_reference import dense, packed
from tests.kernels.reference import check

OPS = torch.ops.fly
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")],
    ),
]
# inductor needs a C++ compiler for CPU tensors
BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
devices = pytest.mark.parametrize("device", DEVICES)
E4M3 = torch.float8_e4m3fn


def skip_without_8_bit(device, monkeypatch):
    """Leave 8-bit inputs to targets that have kernels for them."""
    if device == "cpu":
        monkeypatch.setenv("FLY_ARCH", "gfx950")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")


@pytest.fixture(autouse=True)
def inference():
    torch.compiler.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def random(record_property):
    seed = secrets.randbits(31)
    record_property("seed", seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    return lambda *shape, device="cpu": torch.randn(*shape).bfloat16().to(device)


def int32(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def right(result, reference):
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out.cpu(), reference, None if lse is None else lse.cpu())
    assert report.ok, str(report)


QKV = [(2, 5, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32)]
WIDE = [(2, 5, 4, 128), (2, 9, 2, 128), (2, 9, 2, 128)]
ROWS = [(8, 4, 32), (8, 2, 32), (8, 2, 32)]
OFFSETS = {"cu_seqlens_q": (0, 3, 8), "cu_seqlens_kv": (0, 3, 8), "max_seqlen_q": 5, "max_seqlen_kv": 5}
# name: (operation, shapes of its tensors, other arguments, keywords); tuples of ints become int32 tensors
CALLS = {
    "dense": ("flash_attn", QKV, (True,), {}),
    "lse": ("flash_attn", QKV, (False,), {"return_lse": True, "softmax_scale": 0.3, "num_kv_splits": 2}),
    "packed": ("flash_attn", ROWS, (True,), OFFSETS | {"return_lse": True}),
    "window": ("flash_attn", QKV, (False,), {"window_size": [3, 1], "softcap": 9.0, "seqused_kv": (9, 4)}),
    "pages": (
        "flash_attn",
        [(8, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32)],
        (True,),
        {"cu_seqlens_q": (0, 3, 8), "max_seqlen_q": 5, "seqused_kv": (20, 3), "block_table": ((2, 0), (1, 3))},
    ),
    "out": ("flash_attn_out", [*QKV, QKV[0]], (True,), {"return_lse": True}),
    "out of packed": ("flash_attn_out", [*ROWS, ROWS[0]], (True,), OFFSETS),
}


def call_of(name, random, device):
    """(operation, arguments, keywords) of a row of `CALLS`."""
    operation, shapes, more, keywords = CALLS[name]
    tensors = [random(*shape, device=device) for shape in shapes]
    keywords = {
        key: int32(*value, device=device) if isinstance(value, tuple) else value for key, value in keywords.items()
    }
    if operation == "flash_attn_out":
        keywords["out"] = tensors.pop()
    return getattr(OPS, operation).default, (*tensors, *more), keywords


@devices
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(random, name, device):
    operation, arguments, keywords = call_of(name, random, device)
    torch.library.opcheck(operation, arguments, keywords)


@devices
def test_opcheck_of_8_bit_inputs(random, device, monkeypatch):
    skip_without_8_bit(device, monkeypatch)
    tensors = [random(*shape, device=device).to(E4M3) for shape in WIDE]
    scales = {name: torch.rand(2, 2, device=device) for name in DESCALES}
    # not test_schema, which compares inputs by arithmetic that torch does not have on 8 bits
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    out = random(*WIDE[0], device=device)
    for operation, more in ((OPS.flash_attn, {"return_lse": True}), (OPS.flash_attn_out, {"out": out})):
        torch.library.opcheck(operation.default, (*tensors, True), scales | more, test_utils=checks)


@devices
@pytest.mark.parametrize("rotary", [False, True])
def test_opcheck_of_appending(random, rotary, device):
    q, k, cache = random(2, 3, 4, 32, device=device), random(2, 3, 2, 32, device=device), (2, 9, 2, 32)
    tables = [random(9, 8, device=device) if rotary else None for _ in range(2)]
    places = (int32(2, 5, device=device), None, None, None, False)
    caches = [random(*cache, device=device) for _ in range(2)]
    torch.library.opcheck(
        OPS.append_to_cache.default, (q, *caches, k, k, *tables, *places), {"rotate_each_query": True}
    )


@devices
def test_compiled_calls_are_one_operation_and_right(random, device):
    q, k, v = (random(*shape, device=device) for shape in QKV)
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def call(q, k, v):
        return api.flash_attn_func(q, k, v, causal=True, window_size=(4, 0), return_attn_probs=True)

    torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
    (targets,) = graphs
    assert [str(target) for target in targets].count("fly.flash_attn") == 1
    out, lse, mask = torch.compile(call, fullgraph=True, backend=BACKENDS[device])(q, k, v)
    right((out, lse), dense(q.cpu(), k.cpu(), v.cpu(), causal=True, window_size=(4, 0)))
    assert mask.shape == (0,)


@devices
def test_compiled_calls_take_8_bit_inputs_and_scales(random, device, monkeypatch):
    skip_without_8_bit(device, monkeypatch)
    q, k, v = (random(*shape, device=device).to(E4M3) for shape in WIDE)
    scales = {name: torch.rand(2, 2, device=device) + 0.5 for name in DESCALES}

    def call(q, k, v, scales):
        return api.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **scales)

    out, lse, _ = torch.compile(call, fullgraph=True, backend=BACKENDS[device])(q, k, v, scales)
    assert out.dtype == torch.bfloat16
    reference = fp8_reference.reference(
        q.cpu(), k.cpu(), v.cpu(), causal=True, **{n: s.cpu() for n, s in scales.items()}
    )
    right((out, lse), reference)


@devices
def test_compiled_packed_calls_take_new_lengths(random, device):
    compiled = torch.compile(
        api.flash_attn_varlen_qkvpacked_func, fullgraph=True, dynamic=True, backend=BACKENDS[device]
    )
    for lengths in ([3, 5], [7, 0, 4]):
        qkv = random(sum(lengths), 3, 4, 32, device=device)
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        out = compiled(qkv, offsets, max(lengths), causal=True)
        right(out, packed(*qkv.cpu().unbind(1), lengths, lengths, causal=True))


@devices
def test_a_compiled_step_of_decoding_writes_the_cache(random, device):
    q, new = random(2, 1, 4, 32, device=device), [random(2, 1, 2, 32, device=device) for _ in range(2)]
    caches, lengths = [random(2, 9, 2, 32, device=device) for _ in range(2)], int32(4, 7, device=device)
    tables = [random(9, 8, device=device) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    turned = append_to_cache(q, *copies, *new, *tables, lengths)

    def step(q, k_cache, v_cache, k, v, lengths):
        return api.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *tables, lengths, causal=True)

    out = torch.compile(step, fullgraph=True, backend=BACKENDS[device])(q, *caches, *new, lengths)
    assert all(torch.equal(cache, copy) for cache, copy in zip(caches, copies))
    right(out, dense(turned.cpu(), *(copy.cpu() for copy in copies), causal=True, keys=[(0, 5), (0, 8)]))


def test_compiled_results_go_into_out(random):
    q, k, v = (random(*shape) for shape in ROWS)
    lengths = 5, int32(0, 3, 8), 5, int32(0, 3, 8)

    def call(q, k, v, out):
        return vllm.flash_attn_varlen_func(q, k, v, *lengths, causal=True, out=out, return_softmax_lse=True)

    out = torch.zeros_like(q)
    _, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, out)
    right((out, lse), packed(q, k, v, [3, 5], [3, 5], causal=True))


def test_head_dims_are_padded_in_the_graph(random):
    q, k = random(1, 4, 2, 20), random(1, 6, 2, 20)
    out = torch.compile(api.flash_attn_func, fullgraph=True, backend="aot_eager")(q, k, k)
    right(out, dense(q, k, k))


def test_exported_programs_have_the_operation(random):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return api.flash_attn_func(q, k, v, causal=True)

    q, k, v = (random(*shape) for shape in QKV)
    program = torch.export.export(Attention(), (q, k, v))
    assert sum("fly.flash_attn" in str(node.target) for node in program.graph.nodes) == 1
    right(program.module()(q, k, v), dense(q, k, v, causal=True))


def test_a_gradient_of_what_is_written_into_out_is_refused_while_compiling(random):
    q, k, v = (random(*shape) for shape in ROWS)
    lengths = 5, int32(0, 3, 8), 5, int32(0, 3, 8)
    compiled = torch.compile(vllm.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    with (
        torch.enable_grad(),
        pytest.raises(Exception, match="q requires a gradient, but the backward is not available"),
    ):
        compiled(q.requires_grad_(), k, v, *lengths, out=torch.zeros(ROWS[0], dtype=torch.bfloat16))


def test_eager_calls_go_past_the_operation(random, monkeypatch):
    # it costs microseconds on the host
    monkeypatch.setattr(torch_ops, "_run", None)
    q, k, v = (random(*shape) for shape in QKV)
    right(api.flash_attn_func(q, k, v), dense(q, k, v))
