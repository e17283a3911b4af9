"""How TensorIR becomes compiled functions: ahead of time, in a process of its own, kept by digest.

`cache` finds or makes the library of a `Spec`, `runtime` loads it: both are plain Python.
`parameters`, `vectors` and `compile` need TVM, and only the compiling process imports them
(`library_compiler`).  `pi2.backends.kernels` has the functions that compute a model,
`pi2.backends.host` those of the machine that runs the engine."""
