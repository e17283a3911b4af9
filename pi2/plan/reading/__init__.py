"""From a file's values to a document: references, composition, schema errors in plain words."""
