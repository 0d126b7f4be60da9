"""What a run is doing and has done, for people and for programs."""
