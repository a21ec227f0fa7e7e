"""Behind FlashAttention's functions: their options and checks, and torch operations."""
