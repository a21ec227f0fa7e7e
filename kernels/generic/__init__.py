"""The parts of the generic kernel: operands, and its table of tiles."""
