"""What a call and a kernel agree on: the request, its tensors, and the launch that a kernel makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .features import NO_FEATURES, Features
from .scores import LOG2_E

LARGEST_SCALE = 2.0**127
DQ_SUMS = ("float32", "16bit")  # how parts of dq add up: of `dq_accumulate`, the first by default
HEAD_DIMS = range(8, 257, 8)  # of kernels that take any: rows of whole 16-byte pieces


Tensors = Mapping[str, Any]
"""What a call gives to kernels, by name; a name that is not there, or None, is what the call does not have.

Dense: q, out (B, Sq, H, D), k, v (B, Skv, Hkv, D), lse (B, H, Sq) float32. Packed: q, out (total_q, H, D), k, v
(total_kv, Hkv, D), lse (H, total_q), cu_seqlens_q, cu_seqlens_kv (B + 1,) int32. With pages, either form's q, out and
lse, and k, v (pages, page_size, Hkv, D). v and out may have another D than q and k. debug_counts: (2,) float32.
workspace: memory of any dtype, see `Launch`. Then `Request.operands`: tensors, and to prepare a kernel with, numbers.

A kernel takes what its parameters name (`work.steps`); what another kernel takes besides is one more name here.
"""


def aux_name(index: int) -> str:
    """What an auxiliary tensor of `score_mod` and `mask_mod` is called among a call's tensors."""
    return f"aux{index}"


@dataclass(frozen=True)
class Request:
    """What a caller asks for, in the terms that decide the kernel; also what the chosen kernel is prepared for.

    `dtype` is fly's name ("bf16", "f16"). Lengths are in tokens, the longest sequence's when packed, and `batch`
    counts sequences; `cross_seqlen`: queries and keys of a sequence may differ in number. `num_kv_splits` 0 leaves
    the number to the kernel. `alignment`: bytes, 16 at most, that divide the addresses and strides of q, k, v and
    out; `kv_alignment`: those of k and v. `kv_pitch`: bytes from one row of K or V to the next, the larger of the
    two; `q_pitch`: of q and out. `page_size`: keys of a page, None where they are not in pages.
    `features` are keys of `catalogue.FEATURES`; `tuning` holds the tuning options given, by name. `head_dim_v`: of
    v and out, None when it is `head_dim`. `static_features`: what kernels are built with for the features, and
    `aux_tensors`: how many of these their functions have. `deterministic`: gradients are the same bits every time.
    `dq_accumulate`: how blocks of keys add parts of dq up, one of `DQ_SUMS`; the backward pass' alone.
    `operand_gradients`: of a backward pass, which makes gradients of a bias or of auxiliary tensors too. `partial`:
    results of parts of the keys, f32, are left in the workspace (`work.split_combine.Partials`), be it one part.
    `bias_by_query`: there is a bias, and queries have theirs.
    """

    head_dim: int
    dtype: str
    causal: bool
    cross_seqlen: bool
    return_lse: bool
    batch: int
    seq_len: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    softmax_scale: float
    num_kv_splits: int = 1
    alignment: int = 16
    kv_alignment: int = 16
    q_pitch: int = 0
    kv_pitch: int = 0
    page_size: int | None = None
    features: tuple[str, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict, hash=False)
    head_dim_v: int | None = None
    static_features: Features = NO_FEATURES
    aux_tensors: int = 0
    deterministic: bool = False
    dq_accumulate: str = DQ_SUMS[0]
    operand_gradients: bool = False
    bias_by_query: bool = False
    partial: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """What kernels take after their own parameters, by its names among a call's `Tensors`, in order."""
        return (*self.static_features.operands, *map(aux_name, range(self.aux_tensors)))

    @property
    def value_dim(self) -> int:
        """Head dimension of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scale_log2(self) -> float:
        """softmax_scale * log2(e), in f32's range: with a scale of 0, masked scores would be NaN."""
        least = 2.0**-126 if self.tuning.get("daz") else 2.0**-149
        return min(max(self.softmax_scale * LOG2_E, least), LARGEST_SCALE)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that is compiled and bound for one kind of call.

    `run(tensors, stream)` queues it on other tensors of the same shapes, strides, dtypes, alignment and device;
    `stream` is a driver's handle, None for torch's current stream. When `workspace_bytes` is not 0, the tensors
    have a workspace of so many bytes, 16-byte aligned, whose content does not matter. `splits`: how many parts a
    `partial` request leaves in it, `partials_at` so many bytes from its beginning on.

    `at(addresses, stream)` is the same for who has addresses already: those of the tensors called `names`, in order,
    in a list that is its own from then on.
    """

    run: Callable[[Tensors, int | None], None]
    workspace_bytes: int = 0
    at: Callable[[list[int], int | None], None] | None = None
    names: tuple[str, ...] = ()
    splits: int = 0
    partials_at: int = 0


Prepare = Callable[[Tensors, Request], Launch]
"""What a kernel's module has as `prepare`: it compiles and binds; a workspace may be missing at that time."""
