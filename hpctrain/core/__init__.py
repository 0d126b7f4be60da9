"""The training core: what every rank does. It knows no concrete model."""
