"""What the tests share: ranks in forked processes, the sandbox cluster, polling."""
