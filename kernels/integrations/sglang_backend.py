"""SGLang's attention backend "fly", without a change in SGLang.

    from fly_attention.integrations import sglang_backend
    sglang_backend.register()    # at the top of the program that starts the server, whose processes import it again
    ServerArgs(..., attention_backend="fly", page_size=64)    # or --attention-backend fly --page-size 64

What SGLang calls is in https://github.com/sgl-project/sglang: layers/attention/base_attn_backend.py at 009db01a and
attention_registry.py at 00a66ebe. The module can be imported without SGLang; `FlyAttentionBackend` is a subclass of
its base class, made when it is first asked for.

Prompts behind what a radix tree has of them, decoding, and drafts that are verified, also in trees, on the pool's
buffers of 16 bits or float8_e4m3fn, seen as pages. Pages of a power of two from 16 on are fast; of other sizes,
SGLang's default of 1 among them, the generic kernel serves them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fly.errors import UnsupportedError

from ..flash_attn_interface import flydsl_flash_attn_func
from ..problem.catalogue import NO_WINDOW
from ..problem.tree_mask import tree_bits, tree_mask
from .slots import scales_of

NAME = "fly"
_PACKAGE = "sglang.srt"
_ATTENTION = f"{_PACKAGE}.layers.attention"


def register() -> None:
    """Have SGLang know the backend's name in this process."""
    registry = importlib.import_module(f"{_ATTENTION}.attention_registry")
    arguments = importlib.import_module(f"{_PACKAGE}.server_args")
    if NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(NAME)(lambda runner: _class()(runner))
        arguments.add_attention_backend_choices([NAME])


@dataclass(frozen=True)
class FlyMetadata:
    """A step's batch: `queries` (B + 1,), `lengths` (B,) and `table` (B, pages of a sequence), int32.

    `tree`: what `tree_mask` gives, of drafts in trees.
    """

    queries: torch.Tensor
    longest_query: int
    lengths: torch.Tensor
    table: torch.Tensor
    tree: Mapping[str, Any] = field(default_factory=dict)


class _Backend:
    """The methods that SGLang calls, once a step and once a layer."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if getattr(model_runner, "use_mla_backend", False):
            _refuse("latent attention (MLA)", "models with keys and values of their own")
        self.tokens = model_runner.req_to_token_pool.req_to_token
        self.page_size: int = model_runner.page_size
        self.longest: int = model_runner.model_config.context_len
        self.metadata: FlyMetadata | None = None
        self.graphs: FlyMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """See SGLang."""
        mode, lengths, speculation = forward_batch.forward_mode, forward_batch.seq_lens, forward_batch.spec_info
        tree: Mapping[str, Any] = {}
        drafts = 0
        if mode.is_target_verify():
            longest = drafts = speculation.draft_token_num
            queries = torch.arange(len(lengths) + 1, device=lengths.device, dtype=torch.int32) * drafts
            tree = _tree_of(speculation.custom_mask, lengths, drafts, queries)
            lengths = lengths + drafts
        elif speculation is not None:
            _refuse("a draft model", "another draft attention backend, beside which this one verifies")
        elif mode.is_decode():
            queries, longest = torch.arange(len(lengths) + 1, device=lengths.device, dtype=torch.int32), 1
        else:
            counts = forward_batch.extend_seq_lens
            queries = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            longest = max(forward_batch.extend_seq_lens_cpu)
        host = forward_batch.seq_lens_cpu
        keys = self.longest if host is None else int(host.max()) + drafts
        table = self._pages(forward_batch.req_pool_indices, keys)
        self.metadata = FlyMetadata(queries, longest, lengths.to(torch.int32), table, tree)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory of captured decoding steps."""
        numbers = {"dtype": torch.int32, "device": self.tokens.device}
        table = torch.zeros(max_bs, -(-self.longest // self.page_size), **numbers)
        self.graphs = FlyMetadata(torch.arange(max_bs + 1, **numbers), 1, torch.ones(max_bs, **numbers), table)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """See SGLang."""
        if spec_info is not None or encoder_lens is not None or not forward_mode.is_decode():
            _refuse("a graph of anything but decoding", "disable_cuda_graph=True")
        self._fill(bs, req_pool_indices, seq_lens)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """See SGLang."""
        self._fill(bs, req_pool_indices[:bs], seq_lens[:bs])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have one key."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use Triton beside."""
        return True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer: k and v, (tokens, Hkv · D), to the pool, then attention of q, (tokens, H · D).

        Raises:
            UnsupportedError: what is not there, by name.
        """
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        if layer.is_cross_attention or kind != "decoder":
            _refuse(f"attention of type {kind!r} to other tokens", "a decoder's own")
        pool = forward_batch.token_to_kv_pool
        given = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *given)
        batch = self.metadata
        assert batch is not None, "SGLang calls init_forward_metadata first"
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        keys, values = (x.view(-1, self.page_size, *x.shape[1:]) for x in buffers)
        left = layer.sliding_window_size
        out = flydsl_flash_attn_func(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            softmax_scale=layer.scaling,
            cu_seqlens_q=batch.queries,
            max_seqlen_q=batch.longest_query,
            seqused_kv=batch.lengths,
            block_table=batch.table,
            window_size=NO_WINDOW if left is None or left < 0 else (left, -1),
            softcap=layer.logit_cap or 0.0,
            sink=sinks,
            num_kv_splits=0,
            **batch.tree,
            **scales_of(keys, *given),
        )
        assert isinstance(out, torch.Tensor)
        return out.view(len(out), -1)

    forward_decode = forward
    forward_extend = forward

    def _pages(self, requests: torch.Tensor, keys: int) -> torch.Tensor:
        """(B, pages) int32: the page of every `page_size`-th token of each request's up to `keys`."""
        first = torch.arange(0, keys, self.page_size, device=self.tokens.device)
        pages: torch.Tensor = self.tokens[requests[:, None], first] // self.page_size
        return pages.to(torch.int32)

    def _fill(self, batch: int, requests: torch.Tensor, lengths: torch.Tensor) -> None:
        """A decoding step's numbers to where captured graphs read them."""
        whole = self.graphs
        assert whole is not None, "SGLang calls init_cuda_graph_state first"
        whole.lengths[:batch].copy_(lengths)
        whole.table[:batch].copy_(self._pages(requests, self.longest))
        self.metadata = FlyMetadata(whole.queries[: batch + 1], 1, whole.lengths[:batch], whole.table[:batch])


def _tree_of(
    custom_mask: torch.Tensor | None, lengths: torch.Tensor, drafts: int, queries: torch.Tensor
) -> Mapping[str, Any]:
    """`tree_mask` of SGLang's mask: for each request and draft, whether it sees each of its keys, the drafts last.

    None: drafts are chains, whose mask causality is. Computed on the device.
    """
    if custom_mask is None:
        return {}
    rows = lengths.long() + drafts  # elements of a draft's row
    begin = (rows * drafts).cumsum(0) - rows * drafts
    draft = torch.arange(drafts, device=lengths.device)
    row = begin[:, None] + draft * rows[:, None] + lengths[:, None].long()
    seen = custom_mask[row[..., None] + draft].bool()
    return tree_mask(tree_bits(seen).flatten(), lengths.to(torch.int32), queries)


def _refuse(what: str, instead: str) -> None:
    raise UnsupportedError(f"SGLang's fly backend: {what} is not available; accepted: {instead}")


@functools.cache
def _class() -> type:
    """SGLang's class with what is here."""
    base = importlib.import_module(f"{_ATTENTION}.base_attn_backend").AttentionBackend
    return type("FlyAttentionBackend", (_Backend, base), {"__module__": __name__, "__doc__": _Backend.__doc__})


def __getattr__(name: str) -> Any:
    if name != "FlyAttentionBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class()
