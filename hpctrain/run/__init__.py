"""The run directory as code: paths, ledger, causes, identity. Standard library only."""
