"""vLLM's CUSTOM backend as vLLM calls it: its signatures, and steps of an engine over pages."""

from __future__ import annotations

import inspect
import random
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from kernels.integrations import trees, vllm_backend
from tests.kernels.acceptance import EMULATED
from tests.kernels.api import vllm_stub
from tests.kernels.feature_reference import feature_reference
from tests.kernels.packed import offsets
from tests.kernels.reference import check
from tests.kernels.work.batch_invariance import same_bits

HEADS, KV_HEADS, D, PAGE = 2, 1, 64, 16


@pytest.fixture
def vllm(monkeypatch):
    """Modules that stand for vLLM's."""
    vllm_backend._class.cache_clear()
    for name, module in vllm_stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules["vllm.v1.attention.backends.registry"]
    vllm_backend._class.cache_clear()


def test_registering(vllm):
    vllm_backend.register()
    assert [*vllm.overrides] == [vllm.AttentionBackendEnum.CUSTOM]
    module, _, name = vllm.overrides[vllm.AttentionBackendEnum.CUSTOM].rpartition(".")
    assert module == "fly_attention.integrations.vllm_backend"
    backend = getattr(vllm_backend, name)
    assert backend.get_name() == "CUSTOM" and issubclass(backend, vllm_stub.AttentionBackend)
    vllm.overrides[vllm.AttentionBackendEnum.CUSTOM] = "another.package.Backend"
    vllm_backend.register()
    assert vllm.overrides[vllm.AttentionBackendEnum.CUSTOM] == "another.package.Backend"


def test_a_plugin_registers():
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    assert plugins == {"fly_attention": "fly_attention.integrations.vllm_backend:register"}


@pytest.mark.parametrize("name", ["FlyAttentionBackend", "FlyAttentionImpl", "FlyMetadataBuilder"])
def test_signatures_are_vllms(vllm, name):
    """Parameters by name, in order, with their defaults; an implementation may take more at the end."""
    ours = getattr(vllm_backend, name)
    assert not inspect.isabstract(ours)
    theirs = ours.__mro__[2]
    for method, function in vars(theirs).items():
        if not method.startswith("_") or method == "__init__":
            if not callable(getattr(theirs, method)):
                continue
            wanted, given = (
                [(p.name, p.default) for p in inspect.signature(getattr(of, method)).parameters.values()]
                for of in (theirs, ours)
            )
            assert given[: len(wanted)] == wanted, (method, function)


def engine(vllm, monkeypatch, draw, tree=None, **layer):
    """A layer, its builder, and a cache of three requests' pages."""
    draw.choice([run for run in EMULATED if run.has("paged")]).start(monkeypatch)
    backend = vllm_backend.FlyAttentionBackend
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=96),
        speculative_config=tree and SimpleNamespace(speculative_token_tree=tree),
    )
    builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    impl = backend.get_impl_cls()(HEADS, D, D**-0.5, KV_HEADS, **layer)
    shape = backend.get_kv_cache_shape(20, PAGE, KV_HEADS, D)
    if layer.get("kv_cache_dtype", "auto") == "auto":
        cache = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    else:
        cache = torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN of float8_e4m3fn
    table = torch.tensor(draw.sample(range(20), 18), dtype=torch.int32).view(3, 6)
    return builder, impl, cache, table


def drawn(request: int, first: int, count: int, heads: int) -> torch.Tensor:
    """(count, heads, D), a request's own numbers, which do not depend on the step."""
    generator = torch.Generator().manual_seed(1000 * request + 100 * heads + first)
    return torch.randn(count, heads, D, generator=generator).bfloat16()


def step(builder, impl, cache, table, tokens, before, slots=None, layer=None):
    """One step with `tokens` of each request after those of `before`: (query, keys, values, output), packed."""
    queries, total = offsets(tokens), sum(tokens)
    lengths = torch.tensor([a + b for a, b in zip(before, tokens)], dtype=torch.int32)
    places = [torch.arange(a, a + n) for a, n in zip(before, tokens)]
    own_slots = torch.cat([table[i, p // PAGE].long() * PAGE + p % PAGE for i, p in enumerate(places)])
    q, k = (
        torch.cat([drawn(i, a, n, heads) for i, (a, n) in enumerate(zip(before, tokens))])
        for heads in (HEADS, KV_HEADS)
    )
    v = k.flip(-1).contiguous()
    common = vllm_stub.CommonAttentionMetadata(
        queries,
        lengths,
        len(tokens),
        total,
        max(tokens),
        int(lengths.max()),
        table,
        own_slots if slots is None else slots,
    )
    output = torch.full((total, HEADS, D), torch.nan, dtype=torch.bfloat16)
    impl.forward(layer, q, k, v, cache, builder.build(0, common), output)
    return q, k, v, output


LAYERS = (
    {"sliding_window": 9, "sinks": torch.tensor([0.5, -1.0])},
    {"logits_soft_cap": 5.0, "alibi_slopes": [0.5, 0.25]},
)


def test_steps_of_an_engine(vllm, monkeypatch, seed):
    """A prompt in chunks beside another's decoding, and a third that comes later."""
    draw = random.Random(seed)
    layer = draw.choice(LAYERS)
    builder, impl, cache, table = engine(vllm, monkeypatch, draw, **layer)
    before, seen = [0, 0, 0], [[], [], []]
    options = {"softcap": layer.get("logits_soft_cap", 0.0), "sink": layer.get("sinks")}
    if "sliding_window" in layer:
        options["window_size"] = (layer["sliding_window"] - 1, -1)
    if "alibi_slopes" in layer:
        options["alibi_slopes"] = torch.tensor(layer["alibi_slopes"])
    for tokens in ([20, 7, 0], [13, 1, 30], [1, 1, 1]):
        q, k, v, output = step(builder, impl, cache, table, tokens, before)
        for i, parts in enumerate(zip(*(x.split(tokens) for x in (q, k, v, output)))):
            query, out = parts[0], parts[3]
            seen[i].append(parts[1:3])
            if tokens[i]:
                keys, values = (torch.cat(x) for x in zip(*seen[i]))
                expected = feature_reference(query[None], keys[None], values[None], **options)
                assert check(out[None], expected).ok, f"request {i} of {tokens}, seed {seed}"
        before = [a + n for a, n in zip(before, tokens)]


def test_steps_with_a_cache_of_8_bits(vllm, monkeypatch, seed):
    """Keys and values are what the cache has of them, times the layer's scales."""
    draw = random.Random(seed)
    monkeypatch.setattr(sys.modules[__name__], "EMULATED", [run for run in EMULATED if run.has("fp8_cache")])
    builder, impl, cache, table = engine(vllm, monkeypatch, draw, kv_cache_dtype=draw.choice(("fp8", "fp8_e4m3")))
    scales = torch.tensor(0.01), torch.tensor(0.02)
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    before, seen = [0, 0, 0], [[], [], []]
    for tokens in ([20, 7, 0], [13, 1, 30]):
        q, k, v, output = step(builder, impl, cache, table, tokens, before, layer=layer)
        stored = [(x.float() / s).to(torch.float8_e4m3fn).float() * s for x, s in zip((k, v), scales)]
        for i, parts in enumerate(zip(*(x.split(tokens) for x in (q, *stored, output)))):
            seen[i].append(parts[1:3])
            if tokens[i]:
                keys, values = (torch.cat(x)[None] for x in zip(*seen[i]))
                expected = feature_reference(parts[0][None], keys, values)
                assert check(parts[3][None], expected).ok, f"request {i} of {tokens}, seed {seed}"
        before = [a + n for a, n in zip(before, tokens)]


TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"
SEEN = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]  # by each token, the root's place first


def test_steps_with_trees_of_drafts(vllm, monkeypatch, seed):
    """Drafts see their ancestors; a prompt beside them, and a request with fewer tokens, what is before them."""
    builder, impl, cache, table = engine(vllm, monkeypatch, random.Random(seed), tree=TREE)
    first = step(builder, impl, cache, table, [20, 7, 0], [0, 0, 0])
    q, k, v, output = step(builder, impl, cache, table, [6, 1, 11], [20, 7, 0])
    earlier = [[x.split([20, 7, 0])[i] for x in first[1:3]] for i in range(3)]
    for i, parts in enumerate(zip(*(x.split([6, 1, 11]) for x in (q, k, v, output)))):
        keys, values = (torch.cat([old, new])[None] for old, new in zip(earlier[i], parts[1:3]))
        options = {}
        if i == 0:
            bias = torch.zeros(1, 1, 6, 26)
            for row, places in enumerate(SEEN):
                hidden = [20 + place for place in range(6) if place not in places]
                bias[..., row, hidden] = -torch.inf
            options = {"causal": False, "bias": bias}
        expected = feature_reference(parts[0][None], keys, values, **options)
        assert check(parts[3][None], expected).ok, f"request {i}, seed {seed}"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("[(0,), (1, 0)]", r"speculative_token_tree has \(1, 0\) without \(1,\), its parent"),
        ("a tree", r"speculative_token_tree 'a tree'; accepted: a list of paths"),
        (str([(i,) for i in range(64)]), "speculative_token_tree has 65 tokens with its root; accepted: up to 64"),
    ],
)
def test_trees_that_are_none(tree, message):
    with pytest.raises(ArgumentError, match=message):
        trees.seen_by(tree)


def test_a_chain_of_drafts_needs_no_mask():
    assert trees.Trees.of("[(0,), (0, 0), (0, 0, 0)]", None, torch.device("cpu")) is None


def test_batch_invariant_steps(vllm, monkeypatch, seed):
    """With vLLM's variable, a request's decoding has the same bits beside another's prompt."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    builder, impl, cache, table = engine(vllm, monkeypatch, random.Random(seed))
    assert builder.split_keys == vllm_backend.split_for(96) == 2048
    assert vllm_backend.split_for(2**20) == 2**14
    step(builder, impl, cache, table, [20, 7, 0], [0, 0, 0])
    outs = [step(builder, impl, cache, table, [1, 0, others], [20, 7, 0])[3][0] for others in (0, 30)]
    assert same_bits(*outs)


def test_profiling_and_shared_caches(vllm, monkeypatch, unchecked, seed):
    """What is not written: without metadata, by a layer with another's cache, and at slot -1, of padded batches."""
    builder, impl, cache, table = engine(vllm, monkeypatch, random.Random(seed), kv_sharing_target_layer_name="other")
    output = torch.ones(3, HEADS, D)
    assert not impl.forward(None, output, None, None, torch.empty(0), None, output).any()
    assert builder._cudagraph_support is vllm_stub.AttentionCGSupport.UNIFORM_BATCH
    cache.zero_()
    step(builder, impl, cache, table, [2, 1, 1], [0, 0, 0])
    assert not cache.any()
    impl.writes = True
    step(builder, impl, cache, table, [2, 1, 0], [0, 0, 0], torch.tensor([-1, 17, -1]))
    assert [*map(tuple, cache.any(-1).any(-1).nonzero().tolist())] == [(0, 1, 1), (1, 1, 1)]


def test_what_is_missing_is_refused_by_name(vllm, monkeypatch, seed):
    impl = vllm_backend.FlyAttentionImpl
    for option, message in (
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype 'fp8_e5m2' is not available; accepted: one of auto, float16",
        ),
        ({"attn_type": "encoder"}, "attn_type 'encoder' is not available; accepted: 'decoder'"),
    ):
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            impl(HEADS, D, 1.0, **option)
    x = torch.ones(1, HEADS, D)
    with pytest.raises(UnsupportedError, match="a quantised output is not available"):
        impl(HEADS, D, 1.0).forward(None, x, x, x, x, None, x, output_scale=torch.ones(1))
    with pytest.raises(AttributeError, match="no attribute 'FlyNothing'"):
        _ = vllm_backend.FlyNothing
