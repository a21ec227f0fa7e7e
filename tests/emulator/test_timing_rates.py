"""The timing model gives the rates that were measured on hardware."""

from __future__ import annotations

import pytest

from benchmarks.calibrate_timing import rates

TOLERANCE = 0.03
CHOSEN = (
    "v_exp_f32", "v_fma_f32 (8 bytes) unaligned", "MFMA + 3 v_add_f32", "MFMA + 4 v_pk_mul_f32", "MFMA + v_exp_f32",
    "MFMA, 3 add, MFMA, exp", "MFMA, MFMA, 3 add, exp", "ds_read_b32, 8 dwords apart", "LDS: 4 waves of ds_read_b128",
    "ds_read_b32 latency", "MFMA 32x32x16: 1024 FLOP/clk", "MFMA 32x32x64 e4m3: 2048 FLOP/clk",
)  # fmt: skip


@pytest.mark.parametrize(
    "rate", [r for r in rates() if r.what in CHOSEN], ids=lambda rate: f"{rate.what} {rate.arch}"
)
def test_rates(rate):
    assert rate.model() == pytest.approx(rate.measured, rel=TOLERANCE)
