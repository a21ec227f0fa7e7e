"""More waves than a kernel's registers are made for: the compiler spills, the checks have nothing to say about it."""

from __future__ import annotations

import pytest

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import Inputs
from tests.kernels.feature_reference import check_used, feature_reference


@pytest.mark.parametrize(
    ("arch", "kernel", "head_dim", "dtype", "waves", "features"),
    [
        ("gfx942", "generic", 64, "f16", 6, {}),
        ("gfx942", "generic", 128, "bf16", 8, {"softcap": 10.0}),
        ("gfx950", "gfx950", 64, "bf16", 6, {"softcap": 10.0}),
        ("gfx950", "gfx950", 128, "f16", 8, {}),
    ],
)
def test_attention_with_many_waves(arch, kernel, head_dim, dtype, waves, features, emulate, seed):
    emulate(arch, kernel)
    inputs = Inputs([40], [72], heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, seed=seed)
    q, k, v = inputs.tensors()
    out = flydsl_flash_attn_func(q, k, v, causal=True, waves_per_eu=waves, **features)
    report = check_used(out, feature_reference(q, k, v, True, **features))
    assert report.ok, f"seed {seed}: {report}"
