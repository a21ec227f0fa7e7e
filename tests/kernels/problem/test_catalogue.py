"""The table of features: what is derived from it, and what must agree with it."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels import flash_attn_interface
from kernels.api.options import AVAILABLE
from kernels.call.features import CallArguments, check_features
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.catalogue import BY_NAME, FEATURES, MODIFIERS, NUMBERS, OPERANDS
from kernels.problem.features import NO_FEATURES, Features

PARAMETERS = inspect.signature(flydsl_flash_attn_func).parameters
# what is no feature: how much is computed, where, and how it is compiled
OTHERS = """
    q k v causal softmax_scale num_kv_heads return_lse out cross_seqlen num_kv_splits workspace cu_seqlens_q
    cu_seqlens_kv max_seqlen_q max_seqlen_kv aux_tensors waves_per_eu daz dualwave_swp_lazy_rescale
    dualwave_swp_setprio dualwave_swp_enable_stagger debug_counts stream deterministic dq_accumulate names
"""
DEFAULTS = {name: parameter.default for name, parameter in PARAMETERS.items()}


def asked(**options):
    q = torch.zeros(2, 4, 2, 64)
    return CallArguments(q, q, False, 2, False, DEFAULTS | options)


def test_the_function_takes_what_the_records_say():
    keywords = [name for feature in FEATURES for name in feature.keywords]
    assert sorted([*keywords, *OTHERS.split()]) == sorted(PARAMETERS)
    assert len(BY_NAME) == len(FEATURES) and len(set(OPERANDS)) == len(OPERANDS)


def test_torchs_operations_take_what_has_a_type():
    schema = torch.ops.fly.flash_attn.default._schema
    defaults = {a.name: a.default_value for a in schema.arguments}
    for feature in FEATURES:
        for keyword, kind in feature.keywords.items():
            assert (keyword in defaults) == bool(kind)
            if kind and keyword != "window_size":  # a list there, with None for no window
                assert defaults[keyword] == DEFAULTS[keyword]


def test_names_of_flash_attention_lead_to_keywords():
    theirs = {name: ours for feature in FEATURES for name, ours in feature.flash_attention.items()}
    assert theirs.items() <= AVAILABLE.items() and set(theirs.values()) <= set(PARAMETERS)


def test_nothing_is_asked_for_by_default():
    assert check_features(asked()) == (NO_FEATURES, {}, ())


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature.operands], ids=lambda f: f.name)
def test_numbers_are_operands(feature):
    assert set(feature.numbers) == set(NUMBERS).intersection(feature.operands)
    assert (feature in MODIFIERS) == Features(feature.operands).modifies


def test_lengths_of_pages_are_not_asked_for():
    """They come with every table of pages."""
    used = torch.ones(2, dtype=torch.int32)
    assert check_features(asked(seqused_kv=used))[2] == ("seqused",)
    table = torch.zeros(2, 1, dtype=torch.int32)
    features, operands, wanted = check_features(asked(seqused_kv=used, block_table=table))
    assert wanted == ("paged",) and features.operands == ("seqused_kv", "block_table")
    assert list(operands) == ["seqused_kv", "block_table"]
    assert operands["seqused_kv"] is used and operands["block_table"] is table


def test_a_plan_finds_operands_where_the_records_put_them(monkeypatch):
    """A later call hands its tensors on without the checks, in an order of its own code."""
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    q, k, v = (torch.randn(2, 20, 2, 32, dtype=torch.float16) for _ in range(3))

    def options():
        return {
            "seqused_kv": torch.randint(5, 20, (2,), dtype=torch.int32),
            "cache_leftpad": torch.randint(0, 5, (2,), dtype=torch.int32),
            "kv_batch_idx": torch.randperm(2, dtype=torch.int32),
            "window_size": (12, 3),
            "softcap": 3.0,
            "alibi_slopes": torch.rand(2, 2),
            "bias": torch.randn(2, 2, 20, 20),
            "sink": torch.randn(2),
            "dropout_p": 0.3,
            "rng_state": torch.randint(99, (2,)),
        }

    flydsl_flash_attn_func(q, k, v, **options())
    second = options()
    warm = flydsl_flash_attn_func(q, k, v, **second)
    assert len(flash_attn_interface._plans) == 1
    flash_attn_interface._plans.clear()
    assert torch.equal(warm, flydsl_flash_attn_func(q, k, v, **second))
