"""What kernel authors import; this package loads MLIR only when a kernel is traced."""
