"""Bundles: a plan with all that runs it without TVM, such as on a phone.  `building` makes one;
`runtime` is its command line; `replacements` and `stand_ins` replace modules and packages there."""
