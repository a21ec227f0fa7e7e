"""SGLang's backend "fly" as SGLang calls it: its signatures as facts, and steps of an engine over the pool's pages.

https://github.com/sgl-project/sglang, python/sglang/srt/layers/attention/base_attn_backend.py at
009db01a7c0d5460611d543516401eb497641918, attention_registry.py at 00a66ebe136b90479f9ccf9fc4f3d1c08251981c.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from fly.errors import UnsupportedError
from kernels.integrations import sglang_backend
from tests.kernels.acceptance import EMULATED
from tests.kernels.api.test_vllm_backend import HEADS, KV_HEADS, D, drawn
from tests.kernels.feature_reference import feature_reference
from tests.kernels.problem.test_tree_mask import tree
from tests.kernels.reference import check

CONTEXT = 64
# parameters of the base class' methods, behind self
SIGNATURES = {
    "init_forward_metadata": ["forward_batch"],
    "init_cuda_graph_state": ["max_bs", "max_num_tokens"],
    "init_forward_metadata_capture_cuda_graph": [
        *("bs", "num_tokens", "req_pool_indices", "seq_lens", "encoder_lens", "forward_mode", "spec_info"),
    ],
    "init_forward_metadata_replay_cuda_graph": [
        *("bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode", "spec_info"),
        "seq_lens_cpu",
    ],
    "get_cuda_graph_seq_len_fill_value": [],
    "forward": ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
    "forward_decode": ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
    "forward_extend": ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
    "support_triton": [],
}


class AttentionBackend:
    """Stands for SGLang's."""


@pytest.fixture
def sglang(monkeypatch):
    """Modules that stand for SGLang's: its registry, and the names that its arguments accept."""
    sglang_backend._class.cache_clear()
    names = ["sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.server_args"]
    names += [f"{names[3]}.{name}" for name in ("attention_registry", "base_attn_backend")]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    backends, choices = {}, ["fa3"]
    sys.modules[names[4]].add_attention_backend_choices = choices.extend
    registry = sys.modules[names[5]]
    registry.ATTENTION_BACKENDS = backends
    registry.register_attention_backend = lambda name: lambda create: backends.setdefault(name, create)
    sys.modules[names[6]].AttentionBackend = AttentionBackend
    yield SimpleNamespace(backends=backends, choices=choices)
    sglang_backend._class.cache_clear()


def mode(name):
    return SimpleNamespace(is_decode=lambda: name == "decode", is_target_verify=lambda: name == "target_verify")


class Pool:
    """Keys and values of one layer, by token."""

    def __init__(self, page_size: int, dtype: torch.dtype = torch.bfloat16):
        memory = torch.full((2, 256 + page_size, KV_HEADS, D), torch.nan)
        self.buffers = memory.to(dtype).unbind(0)

    def set_kv_buffer(self, layer, places, k, v, k_scale=None, v_scale=None):
        for buffer, new, scale in zip(self.buffers, (k, v), (k_scale, v_scale)):
            buffer[places] = (new if scale is None else new / scale).view(-1, KV_HEADS, D).to(buffer.dtype)

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]


def layer(**given):
    options = {"sliding_window_size": -1, "logit_cap": 0.0, "attn_type": "decoder", "is_cross_attention": False}
    sizes = {"tp_q_head_num": HEADS, "qk_head_dim": D, "scaling": D**-0.5, "layer_id": 0}
    return SimpleNamespace(**options | sizes | given)


def runner(draw, page_size):
    """A model runner with two requests' tokens anywhere in the pool, page by page."""
    pages = torch.tensor(draw.sample(range(1, 256 // page_size), 2 * -(-CONTEXT // page_size))).view(2, -1)
    tokens = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1)[:, :CONTEXT].int()
    table = SimpleNamespace(req_to_token=torch.cat([torch.zeros(1, CONTEXT).int(), tokens]))
    model = SimpleNamespace(context_len=CONTEXT)
    return SimpleNamespace(req_to_token_pool=table, page_size=page_size, model_config=model)


def test_steps_of_an_engine(sglang, monkeypatch, seed):
    """Prompts, chunks behind them, and decoding, as it is and from a graph's memory; windows and sinks."""
    draw = random.Random(seed)
    page_size = draw.choice((16, 1))
    # the tuned kernels' pages have 16 keys or more
    draw.choice([run for run in EMULATED if run.has("paged") and (page_size > 1 or run.kernel == "generic")]).start(
        monkeypatch
    )
    sglang_backend.register()
    run = runner(draw, page_size)
    backend, pool = sglang.backends["fly"](run), Pool(page_size)
    assert isinstance(backend, AttentionBackend) and sglang.choices == ["fa3", "fly"]
    sinks = torch.tensor([0.5, -1.0])
    of_layer = layer(sliding_window_size=11)
    before, seen = [0, 0], [[], []]
    requests = torch.tensor([1, 2])
    for tokens in ([13, 5], [4, 9], [1, 1]):
        ends = [a + n for a, n in zip(before, tokens)]
        lengths = torch.tensor(ends)
        places = [run.req_to_token_pool.req_to_token[i + 1, a:b].long() for i, (a, b) in enumerate(zip(before, ends))]
        q, k = (
            torch.cat([drawn(i, a, n, heads) for i, (a, n) in enumerate(zip(before, tokens))])
            for heads in (HEADS, KV_HEADS)
        )
        decodes = tokens == [1, 1]
        batch = SimpleNamespace(
            forward_mode=mode("decode" if decodes else "extend"),
            spec_info=None,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_seq_lens=torch.tensor(tokens),
            extend_seq_lens_cpu=tokens,
            req_pool_indices=requests,
            out_cache_loc=torch.cat(places),
            token_to_kv_pool=pool,
        )
        backend.init_forward_metadata(batch)
        out = backend.forward(q.flatten(1), k.flatten(1), k.flatten(1), of_layer, batch, sinks=sinks)
        if decodes:
            backend.init_cuda_graph_state(4, 4)
            given = (2, requests, lengths)
            backend.init_forward_metadata_capture_cuda_graph(2, 2, requests, lengths, None, mode("decode"), None)
            backend.init_forward_metadata_replay_cuda_graph(*given, 0, None, mode("decode"), None, None)
            again = backend.forward_decode(q.flatten(1), None, None, of_layer, batch, sinks=sinks)
            torch.testing.assert_close(again, out, rtol=2e-2, atol=1e-2)
        for i, (query, key, result) in enumerate(zip(*(x.split(tokens) for x in (q, k, out.view(-1, HEADS, D))))):
            seen[i].append(key)
            keys = torch.cat(seen[i])[None]
            expected = feature_reference(query[None], keys, keys, window_size=(11, -1), sink=sinks)
            assert check(result[None], expected).ok, f"request {i} of {tokens}, seed {seed}"
        before = ends


@pytest.mark.parametrize("scale", [torch.tensor(0.02), 0.02, None], ids=["tensor", "number", "none"])
def test_a_pool_of_8_bits(sglang, monkeypatch, scale, seed):
    draw = random.Random(seed)
    draw.choice([run for run in EMULATED if run.has("paged") and run.has("fp8_cache")]).start(monkeypatch)
    run, pool = runner(draw, 16), Pool(16, torch.float8_e4m3fn)
    backend = sglang_backend.FlyAttentionBackend(run)
    of_layer = layer(k_scale=scale, v_scale=scale)
    tokens, (q, k) = (
        [13, 5],
        (torch.cat([drawn(i, 0, n, h) for i, n in enumerate((13, 5))]) for h in (HEADS, KV_HEADS)),
    )
    places = torch.cat([run.req_to_token_pool.req_to_token[i + 1, :n].long() for i, n in enumerate(tokens)])
    lengths = torch.tensor(tokens)
    batch = SimpleNamespace(
        forward_mode=mode("extend"),
        spec_info=None,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_seq_lens=lengths,
        extend_seq_lens_cpu=tokens,
        req_pool_indices=torch.tensor([1, 2]),
        out_cache_loc=places,
        token_to_kv_pool=pool,
    )
    backend.init_forward_metadata(batch)
    out = backend.forward(q.flatten(1), k.flatten(1), k.flatten(1), of_layer, batch).view(-1, HEADS, D)
    factor = 1.0 if scale is None else scale
    stored = (k / factor).to(torch.float8_e4m3fn).float() * factor
    for i, (query, keys, result) in enumerate(zip(*(x.split(tokens) for x in (q, stored, out)))):
        expected = feature_reference(query[None], keys[None], keys[None])
        assert check(result[None], expected).ok, f"request {i}, seed {seed}"


@pytest.mark.parametrize("masked", [True, False], ids=["trees", "chains"])
def test_drafts_are_verified(sglang, monkeypatch, masked, seed):
    """Each request has a tree of its own, and SGLang's mask has a row of all keys for each draft."""
    draw = random.Random(seed)
    draw.choice([run for run in EMULATED if run.has("paged")]).start(monkeypatch)
    run, pool, before, drafts = runner(draw, 16), Pool(16), [17, 4], 5
    backend = sglang_backend.FlyAttentionBackend(run)
    tables = [run.req_to_token_pool.req_to_token[i + 1].long() for i in range(2)]
    seen = [tree(draw, drafts) if masked else torch.ones(drafts, drafts).tril().bool() for _ in before]
    old = [drawn(i, 0, n, KV_HEADS) for i, n in enumerate(before)]
    for table, keys in zip(tables, old):
        pool.set_kv_buffer(None, table[: len(keys)], keys, keys)
    q, k = (torch.cat([drawn(i, n, drafts, h) for i, n in enumerate(before)]) for h in (HEADS, KV_HEADS))
    rows = [torch.cat([torch.ones(drafts, n, dtype=torch.bool), mask], 1).flatten() for n, mask in zip(before, seen)]
    lengths = torch.tensor(before)
    batch = SimpleNamespace(
        forward_mode=mode("target_verify"),
        spec_info=SimpleNamespace(draft_token_num=drafts, custom_mask=torch.cat(rows) if masked else None),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        req_pool_indices=torch.tensor([1, 2]),
        out_cache_loc=torch.cat([table[n : n + drafts] for table, n in zip(tables, before)]),
        token_to_kv_pool=pool,
    )
    backend.init_forward_metadata(batch)
    out = backend.forward(q.flatten(1), k.flatten(1), k.flatten(1), layer(), batch).view(-1, HEADS, D)
    for i, (query, new, result) in enumerate(zip(*(x.split(drafts) for x in (q, k, out)))):
        keys = torch.cat([old[i], new])[None]
        bias = torch.zeros(1, 1, drafts, before[i] + drafts)
        bias[..., before[i] :].masked_fill_(~seen[i], -torch.inf)
        expected = feature_reference(query[None], keys, keys, causal=False, bias=bias)
        assert check(result[None], expected).ok, f"request {i}, seed {seed}"


def test_signatures_are_sglangs(sglang):
    """Names in their order; what comes behind has a default."""
    for method, wanted in SIGNATURES.items():
        parameters = [*inspect.signature(getattr(sglang_backend.FlyAttentionBackend, method)).parameters.values()][1:]
        assert [p.name for p in parameters[: len(wanted)]] == wanted, method
        assert all(p.default is not p.empty for p in parameters[len(wanted) :]), method


def test_what_is_missing_is_refused_by_name(sglang, seed):
    run = runner(random.Random(seed), 16)
    with pytest.raises(UnsupportedError, match=re.escape("latent attention (MLA) is not available")):
        sglang_backend.FlyAttentionBackend(SimpleNamespace(**vars(run), use_mla_backend=True))
    backend = sglang_backend.FlyAttentionBackend(run)
    with pytest.raises(UnsupportedError, match="a draft model is not available; accepted: another draft attention"):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=mode("x"), seq_lens=None, spec_info=1))
    with pytest.raises(UnsupportedError, match="a graph of anything but decoding is not available"):
        backend.init_forward_metadata_capture_cuda_graph(1, 1, None, None, None, mode("extend"), None)
    with pytest.raises(UnsupportedError, match="attention of type 'encoder_only' to other tokens is not available"):
        backend.forward(None, None, None, layer(attn_type="encoder_only"), None)
    with pytest.raises(AttributeError, match="no attribute 'FlyNothing'"):
        _ = sglang_backend.FlyNothing
