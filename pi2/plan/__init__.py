"""The plan language: from a file to a plan, layer by layer.

`pi2.fitting.check` is the way in: it asks backends, too.  The rooms, each of which sees only those
below it::

    checking      reading documents with what they name, and rules that need no backend
    composing     documents that extend others, and values given on the command line
    arithmetic    a plan layer by layer; bytes that follow from it alone
    reading       from a file's values to a document
    documents     what plans, devices and models may say
    toml          the text of a file, and where in it everything stands
    weights       how neuron bundles lie in bytes"""
