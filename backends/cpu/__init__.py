"""The cpu backend: TensorIR kernels, compiled for this machine's instruction set.

Activations are quantised to 16 bits per group of 32, as two int8 planes (`kernels.quantize`).
Why not 8 bits: the demo model's logits over 384 tokens of held-out text, against the reference
backend (float32 activations, the same weights):

=======  ==========================  ==================  =====================================
planes   largest difference,         the same, of the    greedy text of 64 tokens
         of the largest logit        worst single token
=======  ==========================  ==================  =====================================
2        2.6e-4                      4.7e-4              as the reference's, in every mode
1        6.2e-3                      1.1e-2              low-rank mode differs from it
=======  ==========================  ==================  =====================================

1e-2 is what is promised.  The second plane costs nothing where memory is the limit, which is
decoding (`tools/bench_kernels.py`), and about half of the rate where arithmetic is.  Most of what
two planes differ by comes from keys and values in fp16.  A plan may have neither rounded
(docs/reference/exactness.md): 1e-4 is promised then."""
