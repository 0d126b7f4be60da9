"""`hpctrain selftest`: what the ranks do to check the cluster, and the proof that layouts rest on."""
