"""Drives an installed MLC-LLM, for dense models on GPUs.

MLC-LLM has a TVM of its own, so it runs in a Python of its own: `worker` is started there and
imports nothing of pi2; `engine` talks with it, a JSON object a line.  It computes whole models and
gives text, not logits: a plan names the backend for a GPU that has all layers, or `pi2 run PLAN
--mlc FOLDER` takes model, context and sampling from another plan.
"""
