"""Programs that run kernels on a device: one per API, behind `interface`."""
