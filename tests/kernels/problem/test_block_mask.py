"""Block-sparse masks: how they are built, what the kernels make of them, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention

from fly.errors import ArgumentError, ArgumentTypeError
from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.problem.block_mask import BlockMask, create_block_mask
from tests.kernels.feature_cases import Inputs, by_sequence_and_head, document_mask, everything
from tests.kernels.feature_reference import check_used, feature_reference


def causal(b, h, q, k):
    return k <= q + 100


def sliding(b, h, q, k):
    return (k <= q + 60) & (k > q - 30)


def of_documents(b, h, q, k, documents, slopes):
    return documents[q] == documents[k]


def sloped(score, b, h, q, k, documents, slopes):
    return score * 0.5 + slopes[h]


def nothing_for_some(b, h, q, k):
    """The second block of queries sees nothing, nor does any query the third block of keys."""
    return ((q < 64) | (q >= 128)) & ((k < 128) | (k >= 192))


@pytest.fixture(autouse=True)
def emulated(request, emulate):
    """An emulated GPU with checks, and the generic kernel."""
    parameters = getattr(request.node, "callspec", None)
    emulate((parameters.params if parameters else {}).get("arch", "gfx950"), "generic")


def dense(mask: BlockMask, first: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """(B, H, Qb, Kb) bool: which blocks are listed."""
    found = torch.zeros(*first.shape[:3], -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1]), dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, first.shape[:3])).tolist():
        found[(*place, first[tuple(place)][: numbers[tuple(place)]].long())] = True
    return found


@pytest.mark.parametrize("mask_mod", [causal, sliding, by_sequence_and_head, nothing_for_some, everything])
@pytest.mark.parametrize("size", [64, (32, 128)])
def test_a_block_mask_lists_what_is_seen(mask_mod, size):
    mask = create_block_mask(mask_mod, 2, 3, 200, 330, "cpu", size)
    rows, keys = mask.BLOCK_SIZE
    b, h, q, k = (torch.arange(n) for n in (2, 3, 200, 330))
    seen = mask_mod(b[:, None, None, None], h[:, None, None], q[:, None], k).expand(2, 3, 200, 330)
    partial = dense(mask, mask.kv_indices, mask.kv_num_blocks)
    whole = dense(mask, mask.full_kv_indices, mask.full_kv_num_blocks)
    for i in range(-(-200 // rows)):
        for j in range(-(-330 // keys)):
            block = seen[:, :, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys].flatten(2)
            assert torch.equal(whole[:, :, i, j], block.all(-1))
            assert torch.equal(partial[:, :, i, j], block.any(-1) & ~block.all(-1))


def of_keys(mask: BlockMask, indices: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """(B, H, Kb, Qb) bool: which query blocks are listed for a key block."""
    found = torch.zeros(*indices.shape[:3], -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0]), dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, indices.shape[:3])).tolist():
        listed = indices[tuple(place)][: numbers[tuple(place)]].tolist()
        assert listed == sorted(set(listed))
        found[(*place, listed)] = True
    return found


@pytest.mark.parametrize("mask_mod", [causal, sliding, by_sequence_and_head, nothing_for_some, everything])
@pytest.mark.parametrize("size", [64, (32, 128)])
def test_transposed_lists_are_the_query_blocks_that_see_a_key_block(mask_mod, size):
    mask = create_block_mask(mask_mod, 2, 3, 200, 330, "cpu", size)
    numbers, indices, whole_numbers, whole_indices = mask.transposed()
    assert all(tensor.dtype == torch.int32 for tensor in mask.transposed())
    partial = dense(mask, mask.kv_indices, mask.kv_num_blocks)
    assert torch.equal(of_keys(mask, indices, numbers), partial.transpose(-1, -2))
    whole = dense(mask, mask.full_kv_indices, mask.full_kv_num_blocks)
    assert torch.equal(of_keys(mask, whole_indices, whole_numbers), whole.transpose(-1, -2))


def test_transposed_lists_of_random_lists_whose_rest_is_anything(seed):
    """Entries past a list's number, and blocks that there are not, are none of its blocks."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(2, 1, 5, 7, generator=generator) < 0.4
    indices = torch.argsort((~flags).int(), stable=True).int()
    numbers = flags.sum(-1).int()
    indices = torch.nn.functional.pad(indices, (0, 3), value=999)
    mask = BlockMask(numbers, indices, None, None, (64, 64), (5 * 64, 7 * 64 - 10), everything)
    assert len(mask.transposed()) == 2
    by_key_numbers, by_key_indices = mask.transposed()
    assert torch.equal(of_keys(mask, by_key_indices, by_key_numbers), flags.transpose(-1, -2)), f"seed {seed}"
    expanded = mask.check_transposed(2, 4, mask.seq_lengths, torch.device("cpu"))
    assert [tuple(tensor.shape[:3]) for tensor in expanded] == [(2, 4, 7)] * 2


def test_transposing_reads_nothing_on_the_host():
    """Tensors without data cannot be read, so neither can a graph's capture be broken nor a device be waited for."""
    numbers, indices = torch.empty(2, 1, 5, dtype=torch.int32), torch.empty(2, 1, 5, 7, dtype=torch.int32)
    lists = [tensor.to("meta") for tensor in (numbers, indices, numbers, indices)]
    mask = BlockMask(*lists, (64, 64), (5 * 64, 7 * 64), everything)
    assert [tuple(tensor.shape) for tensor in mask.transposed()] == [(2, 1, 7), (2, 1, 7, 5)] * 2


def test_a_mask_that_brings_transposed_lists_keeps_them():
    flex = flex_attention.create_block_mask(sliding, 1, 2, 200, 330, device="cpu", BLOCK_SIZE=64)
    mask = BlockMask.of(flex)
    brought = (flex.q_num_blocks, flex.q_indices, flex.full_q_num_blocks, flex.full_q_indices)
    assert all(a is b for a, b in zip(mask.transposed(), brought, strict=True))
    made = replace(mask, q_num_blocks=None, q_indices=None).transposed()
    for ours, theirs in ((made[:2], brought[:2]), (made[2:], brought[2:])):
        assert torch.equal(of_keys(mask, ours[1], ours[0]), of_keys(mask, theirs[1], theirs[0]))


def test_transposed_lists_of_another_size_are_refused():
    mask = create_block_mask(causal, 1, 1, 200, 330, "cpu", 64)
    numbers, *rest = mask.transposed()
    names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    wrong = replace(mask, **dict(zip(names, (numbers[..., :-1], *rest), strict=True)))
    with pytest.raises(
        ArgumentError, match=r"block_mask.q_num_blocks must have shape \(B or 1, H or 1, key blocks\)"
    ):
        wrong.check_transposed(1, 1, (200, 330), torch.device("cpu"))


CASES = [
    ("gfx942", causal, 64, {}),
    ("gfx950", causal, (128, 64), {"num_kv_splits": 2}),
    ("gfx942", sliding, 128, {"softcap": 2.0}),
    ("gfx950", sliding, (32, 128), {"causal": True}),
    ("gfx942", by_sequence_and_head, (64, 64), {"window_size": (100, 50), "num_kv_splits": 3}),
    ("gfx950", nothing_for_some, 64, {}),
    ("gfx942", everything, 64, {"causal": True, "window_size": (90, -1)}),
    ("gfx950", everything, 128, {"seqused": True}),
]


@pytest.mark.parametrize(("arch", "mask_mod", "size", "options"), CASES)
def test_it_is_the_same_as_its_mask_mod(arch, mask_mod, size, options, seed):
    inputs = Inputs([180, 180], [300, 300], head_dim=32, seed=seed)
    q, k, v = inputs.tensors()
    mask = create_block_mask(mask_mod, 2, 2, 180, 300, "cpu", size)
    options = {"causal": False, "sink": inputs.floats(2)} | options
    if options.pop("seqused", False):
        options["seqused_q"], options["seqused_kv"] = (
            torch.tensor(x, dtype=torch.int32) for x in ([180, 5], [210, 0])
        )
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, return_lse=True, **options)
    options.pop("num_kv_splits", None)
    report = check_used(out, feature_reference(q, k, v, mask_mod=mask_mod, **options), lse)
    assert report.ok, f"seed {seed}: {report}"


OTHER_SIZES = [
    ("gfx942", sliding, (128, 112), {}),
    ("gfx950", by_sequence_and_head, (64, 48), {"causal": True}),
    ("gfx942", nothing_for_some, (33, 7), {"num_kv_splits": 2}),
    ("gfx950", causal, (1, 1000), {"softcap": 2.0}),
    ("gfx950", everything, 100, {"window_size": (90, -1)}),
]


@pytest.mark.parametrize(("arch", "mask_mod", "size", "options"), OTHER_SIZES)
def test_blocks_of_any_size(arch, mask_mod, size, options, seed):
    test_it_is_the_same_as_its_mask_mod(arch, mask_mod, size, options, seed)


@pytest.mark.parametrize("kernel", ["", "generic"])
def test_lists_say_what_is_seen_whatever_the_function_says(kernel, seed, monkeypatch):
    """Whole blocks need no function, and blocks that are not listed are not seen, also of sizes that no tile has."""
    monkeypatch.setenv("FLY_KERNEL", kernel)
    rows, keys, batch = 48, 80, 2
    inputs = Inputs([180] * batch, [300] * batch, seed=seed)
    q, k, v = inputs.tensors()
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(0, 3, (batch, 1, 4, 4), generator=generator)  # hidden, in part, whole

    def lists(flags):
        return flags.sum(-1).int(), torch.argsort((~flags).int(), stable=True).int()

    def odd(b, h, i, j):
        return (i + j) % 2 == 1

    mask = BlockMask(*lists(state == 1), *lists(state == 2), (rows, keys), (180, 300), odd)

    def listed(b, h, i, j, *aux):
        own = state[b, 0, i // rows, j // keys]
        return (own == 2) | ((own == 1) & odd(b, h, i, j))

    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    report = check_used(out, feature_reference(q, k, v, causal=False, mask_mod=listed), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_other_auxiliary_tensors_keep_their_places(seed):
    """A table for the blocks comes behind them, and functions of scores do not get it."""
    inputs = Inputs([90], [150], seed=seed)
    q, k, v = inputs.tensors()
    documents, slopes = torch.arange(150, dtype=torch.int32) // 40, inputs.floats(2)
    mask = create_block_mask(of_documents, None, None, 90, 150, "cpu", (48, 56), [documents, slopes])
    options = {"causal": False, "score_mod": sloped, "aux_tensors": [documents, slopes]}
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, return_lse=True, **options)
    report = check_used(out, feature_reference(q, k, v, mask_mod=of_documents, **options), lse)
    assert report.ok, f"seed {seed}: {report}"
    assert flydsl_flash_attn_workspace(q, k, v, block_mask=mask, num_kv_splits=2, **options) > 0


def test_retiled_lists_are_those_of_the_mask_itself():
    """Blocks of 128 that see all or nothing in smaller blocks are not seen in part."""
    mask = create_block_mask(nothing_for_some, None, None, 300, 500, "cpu", (64, 32))
    found, table = mask.retiled(2, 3)
    assert table.shape == (2, 3, 5, 16) and found.BLOCK_SIZE == (128, 128)
    wanted = create_block_mask(nothing_for_some, None, None, 300, 500, "cpu", 128)
    for ours, theirs in zip(found.tensors[::2], wanted.tensors[::2]):
        assert torch.equal(ours, theirs)


def test_documents(seed):
    """A mask with an auxiliary tensor, for all sequences and heads at once; no score of another document counts."""
    inputs = Inputs([200, 200], [200, 200], seed=seed)
    q, k, v = inputs.tensors()
    documents = torch.arange(200, dtype=torch.int32) // 70
    mask = create_block_mask(document_mask, None, None, 200, 200, "cpu", 64, [documents])
    assert mask.kv_num_blocks.shape == (1, 1, 4)
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, aux_tensors=[documents], return_lse=True)
    ref = feature_reference(q, k, v, mask_mod=document_mask, aux_tensors=[documents])
    report = check_used(out, ref, lse)
    assert report.ok, f"seed {seed}: {report}"


def test_blocks_that_are_not_listed_are_not_read(seed):
    """NaN in keys that nobody sees changes nothing; queries whose blocks list nothing get zeros."""
    inputs = Inputs([180], [300], seed=seed)
    q, k, v = inputs.tensors()
    k[:, 128:192] = v[:, 128:192] = math.nan
    mask = create_block_mask(nothing_for_some, None, None, 180, 300, "cpu", 64)
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    assert not out.isnan().any()
    assert (out[:, 64:128] == 0).all() and (lse[..., 64:128] == -math.inf).all()


@pytest.mark.usefixtures("unchecked")
def test_lists_that_are_wrong_stay_inside(seed):
    """Numbers and indices that no list has are cut; the emulator faults on any access outside of the tensors."""
    q, k, v = Inputs([130], [200], seed=seed).tensors()
    mask = create_block_mask(causal, None, None, 130, 200, "cpu", 64)
    wrong = torch.full_like(mask.kv_num_blocks, 1000)
    indices = torch.full_like(mask.kv_indices, 2**20)
    indices[..., 0] = -7
    mask = replace(mask, kv_num_blocks=wrong, kv_indices=indices, full_kv_num_blocks=-wrong)
    flydsl_flash_attn_func(q, k, v, block_mask=mask)


def test_flex_attentions_masks_are_taken(seed):
    """With whole blocks listed apart or not; the result is FlexAttention's own."""
    q, k, v = Inputs([180], [300], heads=2, kv_heads=2, seed=seed).tensors()
    for separate in (True, False):
        flex = flex_attention.create_block_mask(
            sliding, None, None, 180, 300, device="cpu", BLOCK_SIZE=64, separate_full_blocks=separate
        )
        mask = BlockMask.of(flex)
        assert BlockMask.of(mask) is mask and len(mask.tensors) == (4 if separate else 2)
        out = flydsl_flash_attn_func(q, k, v, False, block_mask=mask)
        exact = flex_attention.flex_attention(*(x.transpose(1, 2).float() for x in (q, k, v)), block_mask=flex)
        torch.testing.assert_close(out.float(), exact.transpose(1, 2), atol=2e-2, rtol=0)
    ours = create_block_mask(sliding, None, None, 180, 300, "cpu", 64)
    flex = flex_attention.create_block_mask(sliding, None, None, 180, 300, device="cpu", BLOCK_SIZE=64)
    listed = dense(ours, ours.kv_indices, ours.kv_num_blocks) | dense(
        ours, ours.full_kv_indices, ours.full_kv_num_blocks
    )
    of_flex = BlockMask.of(flex)
    assert torch.equal(listed, flex.to_dense().bool())
    assert of_flex.seq_lengths == ours.seq_lengths and of_flex.BLOCK_SIZE == ours.BLOCK_SIZE


def test_masks_put_together(seed):
    """`and_masks` and `or_masks` start from tensors that they make of the batch's number."""
    both = flex_attention.and_masks(causal, flex_attention.or_masks(sliding, lambda b, h, q, k: k < 9))
    q, k, v = Inputs([70], [130], seed=seed).tensors()
    mask = BlockMask.of(flex_attention.create_block_mask(both, None, None, 70, 130, device="cpu", BLOCK_SIZE=64))
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    wanted = lambda b, h, q, k: causal(b, h, q, k) & (sliding(b, h, q, k) | (k < 9))  # noqa: E731
    report = check_used(out, feature_reference(q, k, v, False, mask_mod=wanted), lse)
    assert report.ok, f"seed {seed}: {report}"


def good(**changes):
    return replace(create_block_mask(everything, None, None, 5, 7, "cpu", 64), **changes)


COUNTS = torch.zeros(1, 1, 1, dtype=torch.int32)
MISTAKES = {
    "a function": (everything, ArgumentTypeError, "block_mask must be a fly_attention.BlockMask, got function"),
    "a flex mask": (
        flex_attention.create_block_mask(everything, None, None, 5, 7, device="cpu"),
        ArgumentTypeError,
        "block_mask must be a fly_attention.BlockMask, got BlockMask; pass fly_attention.BlockMask.of(it)",
    ),
    "other lengths": (
        create_block_mask(everything, None, None, 7, 5, "cpu", 64),
        ArgumentError,
        "block_mask is for (Sq, Skv) = (7, 5), not (5, 7): build one for these lengths",
    ),
    "other heads": (
        create_block_mask(everything, None, 3, 5, 7, "cpu", 64),
        ArgumentError,
        "block_mask.kv_num_blocks must have shape (B or 1, H or 1, query blocks) with (B, H, query blocks) = "
        "(2, 2, 1), got (1, 3, 1)",
    ),
    "int64": (
        good(kv_indices=COUNTS[None].long()),
        ArgumentTypeError,
        "block_mask.kv_indices has dtype torch.int64; accepted: torch.int32",
    ),
    "rank": (
        good(kv_indices=COUNTS),
        ArgumentError,
        "block_mask.kv_indices must have shape (B or 1, H or 1, query blocks, key blocks) with",
    ),
    "no list": (
        good(full_kv_indices=[0]),
        ArgumentTypeError,
        "block_mask.full_kv_indices must be a torch.Tensor, got",
    ),
    "block size": (good(BLOCK_SIZE=(0, 64)), ArgumentError, "block_mask's BLOCK_SIZE must be positive, got (0, 64)"),
    "a captured tensor": (
        good(mask_mod=flex_attention.and_masks(everything, lambda b, h, q, k: COUNTS[q] > 0)),
        ArgumentTypeError,
        "block_mask.mask_mod captures the tensor 'COUNTS': pass it in aux_tensors, and it is an argument after key",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    mask, error, message = MISTAKES[name]
    with pytest.raises(error) as caught:
        flydsl_flash_attn_func(*Inputs([5, 5], [7, 7]).tensors(), block_mask=mask)
    assert type(caught.value) is error and message in str(caught.value)


def test_what_does_not_go_together():
    tensors = Inputs([5], [7]).tensors()
    with pytest.raises(ArgumentError, match="block_mask has a mask_mod of its own: leave mask_mod out"):
        flydsl_flash_attn_func(*tensors, block_mask=good(), mask_mod=everything)
    pages = {"block_table": torch.zeros(1, 1, dtype=torch.int32), "seqused_kv": torch.ones(1, dtype=torch.int32)}
    paged = Inputs([5], [16]).tensors()
    with pytest.raises(ArgumentError, match="block_mask is for k and v without block_table"):
        flydsl_flash_attn_func(*paged, block_mask=good(), **pages)
    packed = Inputs([5], [7], packed=True)
    lengths = {"max_seqlen_q": 5, "max_seqlen_kv": 7}
    with pytest.raises(ArgumentError, match=r"block_mask is for \(B, S, H, D\) tensors; for packed"):
        flydsl_flash_attn_func(*packed.tensors(), block_mask=good(), **packed.form(), **lengths)
    with pytest.raises(ArgumentTypeError, match=r"BlockMask\.of takes a torch\.nn\.attention.*, got list"):
        BlockMask.of([])
    for sizes, name in (((0, 7, 64), "Sq"), ((5, 0, 64), "Skv"), ((5, 7, (64, 0)), "BLOCK_SIZE")):
        with pytest.raises(ArgumentError, match=f"create_block_mask: {name} must be at least 1, got 0"):
            create_block_mask(everything, None, None, *sizes[:2], "cpu", sizes[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_mod": 3}, "score_mod must be a function, got 3"),
        ({"aux_tensors": 3}, "aux_tensors must be a sequence"),
    ],
)
def test_mistakes_beside_blocks_of_any_size_are_named(options, message):
    q = torch.zeros(1, 40, 1, 32, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, "cpu", BLOCK_SIZE=(33, 17))
    with pytest.raises(ArgumentTypeError, match=message):
        flydsl_flash_attn_func(q, q, q, block_mask=mask, **options)
