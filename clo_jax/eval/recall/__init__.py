"""A small long-context model of our own, of the Qwen2 architecture, and the task that it is trained on and judged by:
chains of lookups among as many records as a context holds.

    python -m clo_jax.eval.recall OUT        trains it (minutes on a GPU) and writes a checkpoint of a few megabytes
    python -m clo_jax.bench.recall OUT       what full attention and the approximate policies answer, 8K to 128K tokens
"""
