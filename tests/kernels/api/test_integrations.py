"""Adapters for other projects: vLLM's argument order, and transformers' attention functions on a stub."""

from __future__ import annotations

import inspect
import secrets
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from kernels.api import torch_ops
from kernels.integrations import transformers as hub
from kernels.integrations import vllm
from kernels.problem.catalogue import DESCALES
from tests.kernels.api.api_reference import dense, packed
from tests.kernels.reference import check

NONE = inspect.Parameter.empty
# vLLM's parameters in their order with their defaults, from vllm_flash_attn/flash_attn_interface.py
VLLM = {
    **dict.fromkeys(("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k"), NONE),
    "cu_seqlens_k": None,
    "seqused_k": None,
    "q_v": None,
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
    "block_table": None,
    "return_softmax_lse": False,
    "out": None,
    "scheduler_metadata": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "num_splits": 0,
    "fa_version": 2,
    "s_aux": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def random(record_property):
    seed = secrets.randbits(31)
    record_property("seed", seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    return lambda *shape: torch.randn(*shape).bfloat16()


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def right(result, reference):
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out, reference, lse)
    assert report.ok, str(report)


def test_importing_needs_neither_the_projects_nor_a_gpu():
    program = (
        "import sys, kernels.integrations.vllm, kernels.integrations.transformers\n"
        "import kernels.integrations.vllm_backend\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'transformers', 'vllm', 'cuda'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_signature_is_vllms():
    parameters = inspect.signature(vllm.flash_attn_varlen_func).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(VLLM.items())


@pytest.mark.parametrize("head_dim", [32, 20])
def test_vllm_packed_keys_into_out(random, head_dim):
    queries, keys = [3, 0, 5], [7, 2, 5]
    q, k, v, out = (random(n, h, head_dim) for n, h in ((8, 4), (14, 2), (14, 2), (8, 4)))
    sink = torch.randn(4)
    result, lse = vllm.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=5,
        cu_seqlens_q=int32(0, 3, 3, 8),
        max_seqlen_k=7,
        cu_seqlens_k=int32(0, 7, 9, 14),
        causal=True,
        window_size=[4, 0],
        softcap=0,
        s_aux=sink,
        out=out,
        return_softmax_lse=True,
        fa_version=3,
        # the attention backend passes these with 16-bit tensors too
        q_descale=torch.ones(3, 2),
        k_descale=torch.ones(3, 2),
        v_descale=torch.ones(3, 2),
    )
    assert result.data_ptr() == out.data_ptr()
    right((out, lse), packed(q, k, v, queries, keys, causal=True, window_size=(4, -1), sink=sink))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_vllm_scales_are_those_of_8_bit_tensors(dtype, monkeypatch):
    handed_on = {}
    monkeypatch.setattr(torch_ops, "flydsl_flash_attn_func", lambda *_, **options: handed_on.update(options))
    q, k, scales = torch.ones(8, 4, 128).to(dtype), torch.ones(14, 2, 128).to(dtype), torch.ones(3, 2)
    descales = dict.fromkeys(DESCALES, scales)
    offsets = {"cu_seqlens_q": int32(0, 3, 3, 8), "cu_seqlens_k": int32(0, 7, 9, 14)}
    vllm.flash_attn_varlen_func(q, k, k, max_seqlen_q=5, max_seqlen_k=7, **offsets, **descales)
    assert [handed_on.get(name) is scales for name in DESCALES] == [dtype.itemsize == 1] * 3


def test_vllm_pages_of_ragged_lengths(random):
    lengths, queries = [33, 16, 0, 5], [1, 4, 1, 2]
    q, k, v = random(8, 4, 32), random(6, 16, 2, 32), random(6, 16, 2, 32)
    table = int32(5, 0, 3, 2, 77, 77, 77, 77, 77, 1, -1, -1).view(4, 3)  # pages past a length are not read
    rows = [
        torch.cat([pages[row.clamp(0, 5).long()].flatten(0, 1)[:n] for row, n in zip(table, lengths)])
        for pages in (k, v)
    ]
    out = torch.empty_like(q)
    result, lse = vllm.flash_attn_varlen_func(
        q, k, v, 4, int32(0, 1, 5, 6, 8), 48, seqused_k=int32(*lengths), block_table=table, causal=True, out=out,
        return_softmax_lse=True, num_splits=2,
    )  # fmt: skip
    assert result.data_ptr() == out.data_ptr()
    right((out, lse), packed(q, *rows, queries, lengths, causal=True))
    assert not out[5].any() and (lse[:, 5] == -torch.inf).all()


LAYER = SimpleNamespace(is_causal=True)


def layer(q, k, v, mask=None, module=LAYER, **options):
    """`attention_forward` on (B, S, H, D) tensors."""
    out, weights = hub.attention_forward(module, *(t.transpose(1, 2) for t in (q, k, v)), mask, **options)
    assert weights is None
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    return out


@pytest.fixture
def square(random):
    return random(2, 7, 4, 32), random(2, 7, 2, 32), random(2, 7, 2, 32)


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({}, {"causal": True}),
        ({"scaling": 0.3, "softcap": 10.0}, {"causal": True, "softmax_scale": 0.3, "softcap": 10.0}),
        ({"is_causal": False}, {}),
        ({"module": SimpleNamespace(is_causal=False)}, {}),
        ({"module": SimpleNamespace(is_causal=False), "is_causal": True}, {"causal": True}),
        ({"module": SimpleNamespace()}, {"causal": True}),
        ({"sliding_window": 3}, {"causal": True, "window_size": (2, -1)}),
        ({"sliding_window": 3, "is_causal": False}, {"window_size": (3, 3)}),
        ({"dropout": 0.0, "position_ids": None, "use_cache": True}, {"causal": True}),
    ],
    ids=str,
)
def test_a_layer_without_a_mask(square, options, means):
    right(layer(*square, **options), dense(*square, **means))


def test_a_layer_with_sinks(square):
    sinks = torch.randn(4)
    right(layer(*square, s_aux=sinks), dense(*square, causal=True, sink=sinks))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_says_everything(square, heads, additive):
    seen = torch.rand(2, heads, 7, 7) < 0.5
    seen[0, :, :2] = False  # padding: these queries see nothing
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    out = layer(*square, bias.bfloat16() if additive else seen, sliding_window=2)
    right(out, dense(*square, bias=bias))
    assert not out[0, :2].any()


def test_a_mask_longer_than_the_keys(square):
    seen = torch.rand(2, 1, 7, 20) < 0.5
    seen[..., 0] = True
    right(layer(*square, seen), dense(*square, bias=torch.zeros(2, 1, 7, 7).masked_fill(~seen[..., :7], -torch.inf)))


def test_one_query_of_a_cache_sees_all_keys(random):
    q, k, v = random(2, 1, 4, 32), random(2, 9, 2, 32), random(2, 9, 2, 32)
    right(layer(q, k, v), dense(q, k, v))
    right(layer(q, k, v, sliding_window=4), dense(q, k, v, window_size=(3, -1)))


def test_a_static_cache_that_is_being_filled(random):
    # transformers leaves the mask out then: query i sees keys up to i, and the rest of the cache is empty
    q, k, v = random(2, 4, 4, 32), random(2, 9, 2, 32), random(2, 9, 2, 32)
    right(layer(q, k, v), dense(q, k[:, :4], v[:, :4], causal=True))


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str
)
def test_continuous_batching(random, options):
    """A prompt, and sequences that decode: the cache takes new keys, and gives all of each sequence."""
    queries, keys = [5, 1, 1], [5, 9, 3]
    q, new, k, v = random(1, 7, 4, 32), random(1, 7, 2, 32), random(17, 2, 32), random(17, 2, 32)
    written = []

    class Cache:
        @staticmethod
        def update(key_states, value_states, layer_idx, kwargs):
            written.append((key_states, value_states, layer_idx))
            kwargs |= {name: kwargs[name]["full_attention"] for name in ("cu_seq_lens_k", "max_length_k")}
            return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    of_keys = {"cu_seq_lens_k": {"full_attention": int32(0, 5, 14, 17)}, "max_length_k": {"full_attention": 9}}
    given = {"cu_seq_lens_q": int32(0, 5, 6, 7), "max_length_q": 5, "is_causal": False, **of_keys}
    module = SimpleNamespace(layer_idx=3)
    mask = torch.zeros(1, 1, 7, 17)  # what others need, built anyway
    out = layer(q, new, new, mask, module, cache=Cache(), block_table=None, **given, **options)
    assert [x.shape for x in written[0][:2]] == [(1, 2, 7, 32)] * 2 and written[0][2] == 3
    window = (3, -1) if options else (-1, -1)
    right(out[0], packed(q[0], k, v, queries, keys, causal=True, window_size=window, sink=options.get("s_aux")))


REFUSED = {
    "dropout": (
        {"dropout": 1.0},
        ArgumentError,
        "transformers' attention: dropout must be a probability from 0 up to",
    ),
    "weights": ({"output_attentions": True}, UnsupportedError, 'use attn_implementation="eager"'),
    "blocks": (
        {"cache": object(), "block_table": int32(0)},
        UnsupportedError,
        r"a table of blocks \(block_table\) is",
    ),
    "bias": ({"position_bias": torch.zeros(1)}, UnsupportedError, "position_bias is not available: add it to"),
    "head mask": ({"head_mask": torch.zeros(1)}, UnsupportedError, "head_mask is not available: add it to"),
    "2-D mask": ({"mask": torch.ones(2, 7)}, ArgumentError, r"must broadcast to .* \(2, 4, 7, 7\), got shape \(2, 7"),
    "short mask": ({"mask": torch.ones(2, 1, 7, 6)}, ArgumentError, r"got shape \(2, 1, 7, 6\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layer_refuses(square, name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        layer(*square, **options)


def test_fewer_keys_than_queries_need_a_mask(random):
    with pytest.raises(UnsupportedError, match="needs as many keys as queries, got 3 keys and 4 queries"):
        layer(random(2, 4, 4, 32), random(2, 3, 2, 32), random(2, 3, 2, 32))


def test_register(monkeypatch):
    registered = {}

    class Interface:
        def __init__(self, kind):
            self.register = lambda name, function: registered.setdefault(name, {}).update({kind: function})

    package, masks = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    package.AttentionInterface, masks.AttentionMaskInterface = Interface("attention"), Interface("mask")
    masks.sdpa_mask = object()
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    hub.register()
    hub.register("other")
    functions = {"attention": hub.attention_forward, "mask": masks.sdpa_mask}
    assert registered == {"fly": functions, "other": functions}
    hub.register(continuous_batching=True)
    assert registered.pop("paged|eager") == {"attention": hub.attention_forward}  # with its own mask


def test_register_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        hub.register()
