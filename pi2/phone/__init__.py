"""Bundles: a plan with all that runs it on a machine without TVM, such as a phone.

- `bundle` builds one (``pi2 build``); `contents` says what is copied into it.
- `runtime` is its command line, ``python -m pi2_phone``.
- `replacements` are modules that stand in a bundle in the place of pi2's own, under their names:
  what a phone does otherwise than a PC.
- `stand_ins` are small modules in the place of packages that a phone has not.

Everything else in a bundle is pi2's own code, file by file.
"""
