"""What plans, devices and models may say: keys, quantities, selectors."""
