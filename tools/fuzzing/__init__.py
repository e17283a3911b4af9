"""What hostile files are made of, and what pi2 must do with them: for tools/fuzz.py and tests."""
