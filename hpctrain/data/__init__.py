"""The data room: sample order, packed shards, images, loader, preparation.

This package knows ranks only as numbers given to it. Only `images` and `loader` import torch.
"""
