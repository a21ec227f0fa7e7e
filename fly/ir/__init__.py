"""The IR builder: dtypes, values, memory and control flow on upstream MLIR."""
