"""From a file's values to a document: references, kinds, schema errors in plain words."""
