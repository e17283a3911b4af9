"""The neuron store: a model's weights on disk, for memory mapping and direct reads.

Format version 1, a folder::

    manifest.json             contents of the store; a store without it does not exist
    dense.arrow               embeddings, attention, norms, head, predictors
    layers/ffn-000.arrow ...  the neurons of one layer each
    layers/scales-000.arrow ...  their scales, if bundles have none
    tokenizer.json            and other small files, such as activations.parquet, and how
                              conversations become prompts: tokenizer_config.json and
                              chat_template.jinja, as they come with the checkpoint

Arrow files are in the IPC file format, metadata V5, and can be read as streams as well.

- A layer's file has one record batch with the columns ``bundle: fixed_size_binary(stride)``
  (`pi2.plan.weights.layout`, zeros up to the stride), ``neuron: int32`` (index in the checkpoint)
  and ``check: uint32`` (CRC-32, as `zlib.crc32`, of all bytes of the bundle).  The bundles begin at
  a multiple of 4096 bytes, the other columns at a multiple of 64.
- With resident scales (``bundle.scales`` in the manifest) a layer has a second file with the column
  ``scales: fixed_size_binary``: a row for each neuron, in stored order, with the scales of its
  vectors one after the other.
- ``dense.arrow`` has one record batch of one row per tensor: ``name``, ``precision`` (``int4``,
  ``int8``, ``fp16``, ``fp32``), ``rows``, ``length``, ``weights``, ``scales``; weights and scales
  begin at a multiple of 64 bytes.
- The manifest (`pi2.store.manifest`) repeats all offsets: pi2 opens a store without an Arrow
  library. Its digest of the model covers the keys that decide the weights (`pi2.store.identity`).
  It has the CRC-32 of each MiB of files that are read as a whole.

Numbers are little-endian."""
