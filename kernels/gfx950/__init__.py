"""The parts of the gfx950 kernels."""
