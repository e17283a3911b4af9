"""Parts of ``tools/train_demo.py``, which trains pi2's small demonstration model."""
