"""Long-context decoding in JAX with the KV cache offloaded to host memory (CLO: CPU-light KV cache offloading)."""

__version__ = "0.1.0"
