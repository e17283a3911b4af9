"""Published figures of PowerInfer-2 and its rivals, and the plans that simulate them."""
