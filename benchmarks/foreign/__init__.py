"""Others' attention kernels on our emulator and timing model, next to ours: `python -m benchmarks.foreign`."""
