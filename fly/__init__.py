"""fly: a kernel compiler in Python for AMD and NVIDIA GPUs."""

__version__ = "0.1.0"
