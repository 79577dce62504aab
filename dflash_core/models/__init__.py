"""The two networks as functions of arrays: caches go in as arguments and come back as results."""
