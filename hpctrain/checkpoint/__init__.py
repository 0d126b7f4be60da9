"""Checkpoints: written by all ranks, committed by one rename, verified before they are loaded.

`manifest` and `store` need no torch (folders, hashes, retention); `writer` and `reader` run on the ranks.
"""
