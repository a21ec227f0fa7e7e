"""FlyDSL's newer import path of `flydsl_flash_attn_func`."""

from __future__ import annotations

from ..flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace

__all__ = ["flydsl_flash_attn_func", "flydsl_flash_attn_workspace"]
