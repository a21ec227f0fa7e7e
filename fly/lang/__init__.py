"""The language of kernels: what authors import as `fly.*`."""
