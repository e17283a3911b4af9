"""Files that are run as they are: tensors stay where they lie, in the formats that they have."""
