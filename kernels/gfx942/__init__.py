"""Parts of the gfx942 kernels."""
