"""What plans, devices and models may say: keys, quantities, selectors.

Annotations are evaluated where they stand: pydantic would compile each from its text."""
