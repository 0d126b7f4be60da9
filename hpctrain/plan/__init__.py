"""What can be known before anything is queued. Pure Python: no torch, no I/O."""
