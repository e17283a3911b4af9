"""The plan language: from a file to a plan that may run.

`pi2.plan.resolve` is the way in.  The rooms, each of which sees only those below it::

    authoring     drafts, explanations, schemas, migration, differences: for people who write plans
    checking      the rules, and everything that is found in a plan, its device and its model
    composing     documents that extend others, and values given on the command line
    arithmetic    a plan layer by layer; the bytes it needs, what they cost, what a token costs
    reading       from a file's values to a document
    documents     what plans, devices and models may say
    toml          the text of a file, and where in it everything stands
    weights       how weights lie in bytes, and what they are called
"""
