"""8-bit caches with 16-bit queries: the generic kernel in the emulator, appending, and what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from fly import config
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels import dispatch, flash_attn_interface
from kernels.cache import kv_cache
from kernels.cache.kv_cache import append_to_cache
from kernels.flash_attn_api import flash_attn_func, flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.integrations import vllm
from tests.kernels.cache.fp8_caches import E4M3, KINDS, Cache, Scales, flattened, numbers, queries, wrong
from tests.kernels.packed import offsets

KEYS = [70, 0, 1, 129]
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def drawn(seed, monkeypatch):
    """Everything is drawn from the test's seed, on plans of its own."""
    torch.manual_seed(seed)
    random.seed(seed)
    for module in (flash_attn_interface, kv_cache):
        monkeypatch.setattr(module, "_plans", {})


def kinds() -> tuple[str, str]:
    return random.choice(KINDS), random.choice(KINDS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("size", [None, 16, 24])
@pytest.mark.parametrize(("dims", "group", "rows", "splits"), [((64, 64), 4, 1, 2), ((96, 40), 1, 40, 1)])
def test_caches_in_the_emulator(arch, size, dims, group, rows, splits, monkeypatch, seed):
    """Entries and pages, with what no sequence has NaN."""
    monkeypatch.setenv(config.ARCH.name, arch)
    kind, dtype = kinds(), random.choice((BF16, F16))
    cache = Cache.of(KEYS, 2, dims, kind, size)
    q = queries(len(KEYS), rows, 2 * group, dims[0], dtype=dtype)
    options = {"return_lse": True, "num_kv_splits": splits} | cache.options
    out, lse = flydsl_flash_attn_func(q, cache.k, cache.v, True, **options)
    assert wrong(*flattened(out, lse), cache.parts(q), True) is None, f"seed {seed}: {kind}, {dtype}"


@pytest.mark.parametrize("kind", ["sequence", "key"])
def test_packed_sequences(kind, seed):
    lengths, keys = [1, 20, 0], [30, 20, 5]
    q = queries(sum(lengths), 4, 64, dtype=BF16)
    k, v = (numbers(sum(keys), 2, 64) for _ in range(2))
    scales = [Scales.of(kind, len(keys), (sum(keys),), 2) for _ in range(2)]
    options = {f"{n}_descale": s.given for n, s in zip("kv", scales)}
    options |= {"cu_seqlens_q": offsets(lengths), "cu_seqlens_kv": offsets(keys)}
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(keys)}
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, **options)

    def meant(tensor, scale):
        own = scale.given.split(keys) if kind == "key" else [None] * len(keys)
        return [scale.times(part, b, own[b]) for b, part in enumerate(tensor.split(keys))]

    parts = zip(q.split(lengths), meant(k, scales[0]), meant(v, scales[1]))
    assert wrong(out, lse, list(parts), False) is None, f"seed {seed}"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_byte_is_converted(dtype, monkeypatch):
    """One key a sequence: out is its value, exactly, also a NaN and subnormal ones."""
    for arch in ("gfx942", "gfx950"):
        monkeypatch.setenv(config.ARCH.name, arch)
        q, k = torch.zeros(8, 1, 1, 32, dtype=dtype), torch.zeros(8, 1, 1, 32).to(E4M3)
        v = torch.arange(256, dtype=torch.uint8).view(8, 1, 1, 32).view(E4M3)
        out = flydsl_flash_attn_func(q, k, v)
        assert torch.equal(out.nan_to_num(1e4), v.to(dtype).nan_to_num(1e4))


def test_features_are_those_of_the_converted_cache(seed):
    """What sees scores sees them scaled; powers of two, so that the converted cache is the same."""
    q = queries(1, 20, 2, 32, dtype=BF16)
    k, v = (numbers(1, 50, 1, 32) for _ in range(2))
    scales = [2.0 ** torch.randint(-2, 2, shape).float() for shape in ((1,), (1, 50, 1))]
    wide = [(x.float() * s[..., None]).to(BF16) for x, s in zip((k, v), scales)]
    options = {"softcap": 5.0, "window_size": (33, 0), "sink": torch.randn(2), "bias": torch.randn(2, 20, 50)}
    mine = flydsl_flash_attn_func(q, k, v, k_descale=scales[0], v_descale=scales[1], **options)
    other, near = flydsl_flash_attn_func(q, *wide, **options), 2.0**-8 * wide[1].abs().max().item()
    assert torch.allclose(mine.float(), other.float(), atol=near, rtol=0.0), f"seed {seed}"


def test_scales_of_zero_leave_masked_scores_masked():
    q, k, v = queries(1, 9, 2, 32, dtype=BF16), numbers(1, 9, 2, 32), numbers(1, 9, 2, 32)
    first = flydsl_flash_attn_func(q, k, v, True, k_descale=torch.tensor(0.0))[:, 0]
    assert torch.equal(first, v[:, 0].to(BF16))


# appending


def appended(shape: tuple[int, ...], rows: tuple[torch.Tensor, ...], scales: dict[str, torch.Tensor], **options):
    """Caches of 8 bits, and of 16, to which the same is appended."""
    q, k, v = rows
    eight = [torch.zeros(*shape, x.shape[-1]).to(E4M3) for x in (k, v)]
    wide = [torch.zeros(*shape, x.shape[-1], dtype=q.dtype) for x in (k, v)]
    append_to_cache(q, *eight, k, v, **scales, **options)
    append_to_cache(q, *wide, k, v, **options)
    return eight, wide


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
@pytest.mark.parametrize("dims", [(64, 80), (128, 64)])
@pytest.mark.parametrize("kind", ["none", "tensor", "head", "sequence"])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_are_divided_by_given_scales(arch, dims, kind, paged, monkeypatch, seed):
    monkeypatch.setenv(config.ARCH.name, arch)
    batch, heads, new = 3, 2, 4
    rows = (queries(batch, new, 4, dims[0], dtype=BF16), *(queries(batch, new, heads, d, dtype=BF16) for d in dims))
    lengths = torch.tensor([0, 27, 60], dtype=torch.int32)
    angles = torch.rand(64, dims[0] // 2)
    options = {"rotary_cos": angles.cos().to(BF16), "rotary_sin": angles.sin().to(BF16), "cache_seqlens": lengths}
    shape = (6, 32, heads) if paged else (batch, 64, heads)
    options |= {"block_table": torch.arange(6, dtype=torch.int32).view(3, 2)} if paged else {}
    of = [Scales.of(kind, batch, (), heads).given for _ in range(2)]
    scales = {} if kind == "none" else dict(zip(("k_descale", "v_descale"), of))
    for mine, wide, scale in zip(*appended(shape, rows, scales, **options), of):
        factor = torch.ones(()) if scale is None else scale[:, None] if kind == "sequence" else scale
        values = wide.view(batch, 64, heads, -1).float()
        wanted = (values / (factor[..., None] if factor.dim() else factor)).clamp(-448, 448).to(E4M3)
        assert torch.equal(mine.view(torch.uint8), wanted.view(mine.shape).view(torch.uint8)), f"seed {seed}"


@pytest.mark.parametrize("arch", ["gfx942", "sm_90a"])
@pytest.mark.parametrize("dims", [(64, 64), (80, 256)])
def test_scales_by_key_are_written_beside_rows(arch, dims, monkeypatch, seed):
    """The largest of each row becomes 448; a row of zeros stays one; what is not written keeps its scale."""
    monkeypatch.setenv(config.ARCH.name, arch)
    batch, heads, new = 2, 3, 5
    rows = (queries(batch, new, 3, dims[0], dtype=F16), *(queries(batch, new, heads, d, dtype=F16) for d in dims))
    rows[1][0, 2] = 0.0
    scales = {f"{n}_descale": torch.full((batch, 20, heads), 7.0) for n in "kv"}
    lengths = torch.tensor([3, 15], dtype=torch.int32)
    eight, wide = appended((batch, 20, heads), rows, scales, cache_seqlens=lengths)
    written = torch.zeros(batch, 20, dtype=torch.bool)
    written[0, 3:8] = written[1, 15:] = True
    for mine, values, scale in zip(eight, wide, scales.values()):
        assert (scale[~written] == 7.0).all()
        largest = values.float().abs().amax(-1)[written]
        assert torch.equal(scale[written], (largest * (1 / 448)).clamp(min=2.0**-126)), f"seed {seed}"
        wanted = (values[written].float() / scale[written][..., None]).clamp(-448, 448).to(E4M3)
        assert torch.equal(mine[written].view(torch.uint8), wanted.view(torch.uint8)), f"seed {seed}"


@pytest.mark.parametrize("kind", ["sequence", "key"])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attentions_function_appends_and_attends(kind, packed, seed):
    """New keys are quantised as the cache is, and seen by the queries of the same call."""
    lengths, new, rows = torch.tensor([9, 30], dtype=torch.int32), 3, (3, 40)
    cache = [numbers(*rows, 2, 64) for _ in range(2)]  # an entry more than there are sequences
    k, v = (queries(2, new, 2, 64, dtype=BF16) for _ in range(2))
    q = queries(2, new, 4, 64, dtype=BF16)
    scales = [Scales.of(kind, 2, rows, 2) for _ in range(2)]
    options = {"k_descale": scales[0].given, "v_descale": scales[1].given, "cache_seqlens": lengths}
    given = q, k, v
    if packed:
        given = tuple(x.flatten(0, 1) for x in given)
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new"), offsets([new, new])) | {"max_seqlen_q": new}
    out, lse = flash_attn_with_kvcache(given[0], *cache, *given[1:], causal=True, return_softmax_lse=True, **options)
    meant = []
    for tensor, fresh, scale in zip(cache, (k, v), scales):
        parts = []
        for b, length in enumerate(lengths.tolist()):
            own = scale.given[b, : length + new] if kind == "key" else None
            parts.append(scale.times(tensor[b, : length + new], b, own))
            # half of e4m3's last place, of what was written
            near = torch.isclose(parts[-1][length:], fresh[b].double(), rtol=2.0**-4, atol=4e-3)
            assert near.all(), f"seed {seed}"
        meant.append(parts)
    results = (out, lse) if packed else flattened(out, lse)
    assert wrong(*results, list(zip(q, *meant)), True) is None, f"seed {seed}"


# mistakes


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(E4M3)


def call(**changed):
    q = torch.zeros(2, 3, 4, 64, dtype=BF16)
    return flydsl_flash_attn_func(**{"q": q, "k": e4m3(2, 5, 2, 64), "v": e4m3(2, 5, 2, 64)} | changed)


def append(**changed):
    q, k, v = (torch.zeros(2, 3, 2, 64, dtype=BF16) for _ in range(3))
    caches = {name: e4m3(2, 5, 2, 64) for name in ("k_cache", "v_cache")}
    return append_to_cache(**{"q": q, "k": k, "v": v, "cache_seqlens": 1} | caches | changed)


SHARED = torch.ones(2, 5, 2)
MISTAKES = {
    "one of two": (
        call,
        {"v": torch.zeros(2, 5, 2, 64, dtype=BF16)},
        TypeError,
        "k must have q's dtype torch.bfloat16,",
    ),
    "said what may be": (
        call,
        {"v": torch.zeros(2, 5, 2, 64, dtype=BF16)},
        TypeError,
        "or k, v both torch.float8_e4m3fn",
    ),
    "e5m2": (call, {n: e4m3(2, 5, 2, 64).view(torch.float8_e5m2) for n in "kv"}, TypeError, "k must have q's dtype"),
    "scale of q": (
        call,
        {"q_descale": torch.ones(2, 2)},
        ValueError,
        "q_descale is for q of 8 bits, got q of torch.bf",
    ),
    "shape": (
        call,
        {"k_descale": torch.ones(2, 5)},
        ValueError,
        "or one for each key and head, k's (2, 5, 2), got (2, 5)",
    ),
    "dtype": (
        call,
        {"v_descale": torch.ones(2, 2).half()},
        TypeError,
        "v_descale has dtype torch.float16; accepted: tor",
    ),
    "dropout on Hopper": (
        lambda **options: dispatch.choose("sm_90a", flash_attn_interface.checked(*tensors(), **options).request).name,
        {"dropout_p": 0.5},
        None,
        "generic",
    ),
    "16-bit cache": (
        append,
        {n: torch.zeros(2, 5, 2, 64, dtype=BF16) for n in ("k_cache", "v_cache")} | {"k_descale": torch.ones(2)},
        ValueError,
        "k_descale is for caches of 8 bits, got k_cache of torch.bfloat16: leave it out",
    ),
    "one cache": (
        append,
        {"k_cache": torch.zeros(2, 5, 2, 64, dtype=BF16)},
        TypeError,
        "v_cache must have q's dtype",
    ),
    "odd rows": (
        append,
        {n: e4m3(2, 5, 2, 60) for n in ("k_cache", "v_cache")}
        | {n: torch.zeros(2, 3, 2, 60, dtype=BF16) for n in "qkv"},
        ValueError,
        "k_cache of 8 bits must have a head_dim in steps of 8, got 60",
    ),
    "append's scales": (
        append,
        {"v_descale": torch.ones(3)},
        ValueError,
        "v_descale must have shape (), (1,), (Hkv,) or (B, Hkv) = (2, 2), or be written by key and head, v_cache's",
    ),
    "append's dtype": (
        append,
        {"v_descale": torch.ones(2).int()},
        TypeError,
        "v_descale has dtype torch.int32; accepted",
    ),
    "no tensor": (append, {"k_descale": 1.0}, TypeError, "k_descale must be a torch.Tensor, got float"),
    "overlap": (
        append,
        {"k_descale": torch.ones(1).expand(2, 5, 2)},
        ValueError,
        "k_descale must not overlap itself, got shape (2, 5, 2) with strides (0, 0, 0)",
    ),
    "shared": (
        append,
        {"k_descale": SHARED, "v_descale": SHARED},
        ValueError,
        "k_descale must not share memory with v_d",
    ),
    "8-bit rows": (append, {n: e4m3(2, 3, 2, 64) for n in "qkv"}, UnsupportedError, "only 16-bit keys are appended"),
}


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, 3, 4, 64, dtype=BF16), e4m3(2, 5, 2, 64), e4m3(2, 5, 2, 64)


@pytest.mark.parametrize(("function", "changed", "error", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_is_wrong(function, changed, error, text):
    if error is None:
        assert function(**changed) == text
        return
    with pytest.raises(error) as caught:
        function(**changed)
    assert text in str(caught.value)
    assert isinstance(caught.value, ArgumentError | ArgumentTypeError | UnsupportedError)


def test_there_are_no_gradients():
    q, k, v = tensors()
    text = r"8-bit k, v with 16-bit q.*: convert k and v to q's dtype"
    with pytest.raises(UnsupportedError, match=text):
        flash_attn_func(q.requires_grad_(), k, v)
    # as compilers see the call
    with pytest.raises(UnsupportedError, match=r"k is for calls without gradients, and torch.float8_e4m3fn has none"):
        torch.ops.fly.flash_attn(q, k, v, False, return_lse=True)


def test_rows_of_the_table_are_for_what_they_are_good_at():
    """The Hopper kernel for 8-bit caches serves nothing else, and the others on Hopper not these."""
    request = flash_attn_interface.checked(*tensors()).request
    assert request.dtype == "bf16" and request.features == ("fp8_cache",)
    assert dispatch.choose("sm_90a", request).name == "sm90_fp8_cache"
    assert {dispatch.choose(arch, request).name for arch in ("sm_80", "gfx942", "gfx950")} == {"generic"}
    q, k, v = (torch.zeros(2, 5, 2, 64, dtype=BF16) for _ in range(3))
    plain = flash_attn_interface.checked(q, k, v).request
    row = next(kernel for kernel in dispatch.KERNELS if kernel.name == "sm90_fp8_cache")
    why = dispatch.refusal(row, "sm_90a", plain)
    assert why == "is for 8-bit k, v with 16-bit q alone: another kernel serves this call"


def test_vllm_passes_scales_of_16_bits_that_are_none(monkeypatch):
    """Of 8-bit pages beside 16-bit queries, those of k and v are scales, and q's is not."""
    handed_on = {}
    monkeypatch.setattr(vllm, "attend", lambda *given, **options: handed_on.update(given[5]) or (None, None))
    q, scale = torch.zeros(6, 4, 64, dtype=BF16), torch.ones(2, 2)
    pages = SimpleNamespace(k=e4m3(4, 16, 2, 64), v=e4m3(4, 16, 2, 64))
    vllm.flash_attn_varlen_func(
        q,
        pages.k,
        pages.v,
        3,
        offsets([3, 3]),
        16,
        seqused_k=torch.ones(2, dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
    )
    assert "q_descale" not in handed_on and handed_on["k_descale"] is handed_on["v_descale"] is scale
