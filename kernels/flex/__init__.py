"""FlexAttention's function on fly's kernels, and the translation of functions that are written with torch."""
