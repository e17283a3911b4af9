"""TensorIR for Hexagon's vector unit (HVX), and the compiler's program for it."""
