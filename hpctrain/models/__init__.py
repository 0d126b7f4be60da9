"""Models: what they are made of, what they lose, and how they are judged. They know nothing of ranks."""
