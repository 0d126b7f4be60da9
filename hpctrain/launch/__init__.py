"""From the login node to a rank: submit, supervise, start ranks."""
