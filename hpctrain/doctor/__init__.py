"""Is a cluster set up for a run: what Slurm says, and what its nodes say."""
