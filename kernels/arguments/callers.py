"""Messages in the names of the function that was called.

Checks are written in the names of `flydsl_flash_attn_func` and `append_to_cache`, but a caller of FlashAttention's
functions knows their arguments by other names: `seqused_kv` is `cache_seqlens` there, `sink` is `learnable_sink`. A
message therefore marks each argument that it names (`arg`), the error that `problem` makes keeps the marked text, and
where a function hands a call on, its `Caller` says an error again in its own names. Values in a message are never
touched, and a call without an error does nothing for this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fly.errors import FlyError

# no value's repr and no name contains it
_MARK = "\0"
_MARKED = re.compile(f"{_MARK}([^{_MARK}]*){_MARK}")
LONGEST_VALUE = 200  # characters of a value that a message shows


class _Arguments:
    """`arg.q` or `arg("q")`: an argument's name in a message, which may be said in a caller's names.

    Of several, `arg("seqused_q, seqused_kv")`, a caller is told those that it has.
    """

    def __call__(self, name: str) -> str:
        return f"{_MARK}{name}{_MARK}"

    def __getattr__(self, name: str) -> str:
        return self(name)


arg = _Arguments()


def _said(text: str, name: Callable[[str], str]) -> str:
    return _MARKED.sub(lambda found: name(found[1]), text)


def plain(text: str) -> str:
    """A text with its arguments under the names in which it is written."""
    return _said(text, str)


def written(value: Any) -> str:
    """A value's repr for a message, however long or odd it is."""
    try:
        text = repr(value)
    except Exception:  # a caller's own __repr__, or an int with more digits than Python writes
        return f"a {type(value).__name__} that has no repr"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def problem(kind: type[FlyError], text: str, function: str = "") -> FlyError:
    """An error of `kind` that says `text`, in which `arg` marks arguments, after the name of the `function`."""
    error = kind(plain(f"{function}: {text}" if function else text))
    error.marked = text  # type: ignore[attr-defined]  # what `Caller.tell` alone looks for
    return error


@dataclass(frozen=True, eq=False)
class Caller:
    """A function that hands its call on: its name, and what it calls the arguments of the function behind it.

    `names`: its own name of each argument that it has; `behind`: the function that has the others, which may be this
    one. `paged` is what it is to callers who pass their table of pages as page_table, where it also has that name.
    """

    function: str
    names: Mapping[str, str]
    behind: str = "flydsl_flash_attn_func"
    paged: Caller | None = None

    @property
    def key(self) -> str:
        """What a torch operation carries instead of the caller."""
        return f"{self.function} > {self.behind} > {self.names.get('block_table')}"

    def given(self, extras: Mapping[str, Any]) -> Caller:
        """This caller under the names that a call uses, of which `extras` are the keywords."""
        return self if self.paged is None or extras.get("page_table") is None else self.paged

    def name(self, arguments: str) -> str:
        """What arguments, a comma between them, are called: those that this function has, or that it has none."""
        if self.function == self.behind:
            return arguments
        own = [self.names[argument] for argument in arguments.split(", ") if argument in self.names]
        return ", ".join(dict.fromkeys(own)) if own else f"{arguments} of {self.behind}"

    def tell(self, error: FlyError) -> None:
        """Change the message of an error that `problem` made to this function's names."""
        text = getattr(error, "marked", None)
        if text is not None:
            error.args = (f"{self.function}: {_said(text, self.name)}",)


def _names(*same: str, **others: str) -> dict[str, str]:
    return {name: name for name in same} | others


_SCORES = _names(
    "softmax_scale", "causal", "window_size", "softcap", "q_descale", "k_descale", "v_descale", "fp8_accumulate"
)
_COMMON = _SCORES | _names(
    "alibi_slopes",
    "attention_chunk",
    "split_keys",
    num_kv_splits="num_splits",
    seqused_kv="seqused_k",
    sink="learnable_sink",
    return_lse="return_attn_probs",
)
_DENSE = _COMMON | _names("q", "k", "v", "seqused_q", "dropout_p", "deterministic", "dq_accumulate")
_VARLEN = _DENSE | _names(
    "cu_seqlens_q", "max_seqlen_q", "block_table", cu_seqlens_kv="cu_seqlens_k", max_seqlen_kv="max_seqlen_k"
)
_PAGES = {"block_table": "page_table"}
_CACHE = _COMMON | _names(
    "q",
    "cu_seqlens_q",
    "max_seqlen_q",
    "cache_leftpad",
    "block_table",
    k="k_cache",
    v="v_cache",
    seqused_kv="cache_seqlens",
    kv_batch_idx="cache_batch_idx",
    return_lse="return_softmax_lse",
)
_APPEND = _names(
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
    *("cache_leftpad", "block_table", "rotary_interleaved", "k_descale", "v_descale"),
)


def _parts(tensor: str, names: str, tokens: str) -> dict[str, str]:
    """What the parts of a packed tensor are called; `tokens` are the dimensions before the parts'."""
    return {name: f"{tensor}[{tokens}, {i}]" for i, name in enumerate(names)}


def _also_page_table(function: str, names: dict[str, str], behind: str = Caller.behind) -> Caller:
    return Caller(function, names, behind, Caller(function, names | {"block_table": "page_table"}, behind))


OWN = Caller("flydsl_flash_attn_func", {})
FUNC = Caller("flash_attn_func", _DENSE)
KVPACKED = Caller("flash_attn_kvpacked_func", _DENSE | _parts("kv", "kv", ":, :"))
QKVPACKED = Caller("flash_attn_qkvpacked_func", _DENSE | _parts("qkv", "qkv", ":, :"))
VARLEN = _also_page_table("flash_attn_varlen_func", _VARLEN)
VARLEN_KVPACKED = _also_page_table("flash_attn_varlen_kvpacked_func", _VARLEN | _parts("kv", "kv", ":"))
VARLEN_QKVPACKED = _also_page_table(
    "flash_attn_varlen_qkvpacked_func",
    _VARLEN
    | _parts("qkv", "qkv", ":")
    | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "cu_seqlens")
    | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), "max_seqlen"),
)
KVCACHE = _also_page_table("flash_attn_with_kvcache", _CACHE)
APPEND = _also_page_table("flash_attn_with_kvcache", _APPEND, "append_to_cache")
VLLM = Caller("vllm.flash_attn_varlen_func", _VARLEN | _names("out", sink="s_aux", return_lse="return_softmax_lse"))
TRANSFORMERS = Caller(
    "transformers' attention",
    _names(
        *("softcap", "causal"),
        q="query",
        k="key",
        v="value",
        bias="attention_mask",
        sink="s_aux",
        softmax_scale="scaling",
        window_size="sliding_window",
        dropout_p="dropout",
        cu_seqlens_q="cu_seq_lens_q",
        cu_seqlens_kv="cu_seq_lens_k",
        max_seqlen_q="max_length_q",
        max_seqlen_kv="max_length_k",
    ),
)
_SDPA = _names(
    "dropout_p", q="query", k="key", v="value", causal="is_causal", softmax_scale="scale", bias="attn_mask"
)
DIFFUSERS = Caller("diffusers' attention", _SDPA)
CASCADE = Caller("cascade_attention", {}, behind="cascade_attention")  # whose names of its arguments are the same
PREFIX = Caller(
    "cascade_attention",
    _names("q", "softmax_scale", "softcap", k="prefix_k", v="prefix_v")
    | {"block_table": "prefix_block_table", "seqused_kv": "prefix_seqlen"},
)
FLEX = Caller(
    "flex_attention",
    _names("score_mod", "block_mask", q="query", k="key", v="value", softmax_scale="scale")
    | {"aux_tensors": "a tensor that score_mod or mask_mod captures"},
)
TORCH = Caller(
    "torch's flash attention",
    _SDPA
    | _names(
        *("out", "alibi_slopes", "block_table"),
        window_size="window_size_left, window_size_right",
        cu_seqlens_q="cum_seq_q",
        cu_seqlens_kv="cum_seq_k",
        max_seqlen_q="max_q",
        max_seqlen_kv="max_k",
        seqused_kv="seqused_k",
        num_kv_splits="num_splits",
        lse="logsumexp",
        dout="grad_out",
    ),
)
_INNER = _names(
    *("q", "k", "v", "dropout_p", "softmax_scale", "causal", "softcap", "alibi_slopes"),
    window_size="window_size_left, window_size_right",
)
_INNER_VARLEN = _INNER | _names(
    "cu_seqlens_q", "max_seqlen_q", cu_seqlens_kv="cu_seqlens_k", max_seqlen_kv="max_seqlen_k"
)
_WRITTEN = _names("dout", "out", "dq", "dk", "dv", "rng_state", lse="softmax_lse")
INNER_FORWARD = Caller("_flash_attn_forward", _INNER)
INNER_BACKWARD = Caller("_flash_attn_backward", _INNER | _WRITTEN)
INNER_VARLEN_FORWARD = Caller(
    "_flash_attn_varlen_forward",
    _INNER_VARLEN | _names("block_table", cache_leftpad="leftpad_k", seqused_kv="seqused_k"),
)
INNER_VARLEN_BACKWARD = Caller("_flash_attn_varlen_backward", _INNER_VARLEN | _WRITTEN)
_ALL = (
    *(INNER_FORWARD, INNER_BACKWARD, INNER_VARLEN_FORWARD, INNER_VARLEN_BACKWARD),
    *(
        FUNC,
        KVPACKED,
        QKVPACKED,
        VARLEN,
        VARLEN_KVPACKED,
        VARLEN_QKVPACKED,
        KVCACHE,
        APPEND,
        VLLM,
        TRANSFORMERS,
        TORCH,
    ),
)
# by their keys
CALLERS: Mapping[str, Caller] = {
    caller.key: caller for caller in (*_ALL, *(caller.paged for caller in _ALL if caller.paged is not None))
}
