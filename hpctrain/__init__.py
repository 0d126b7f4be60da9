"""hpctrain: a Slurm-native training toolkit for clusters of consumer GPUs."""

__version__ = "0.1.0"
