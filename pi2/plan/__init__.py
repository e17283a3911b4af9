"""The plan language: from a file to a plan, layer by layer.

`pi2.fitting.check` is the entry point: it asks backends as well. The rooms, each of which sees only
the rooms below it::

    checking      reading documents with the documents they name, and rules that need no backend
    arithmetic    a plan layer by layer, and the bytes that follow from it
    reading       from the values of a file and of files that it extends to a document
    documents     keys of plans, devices and models
    toml          the text of a file, and the place of everything in it
    weights       layout of neuron bundles in bytes"""
