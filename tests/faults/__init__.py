"""What storage, schedulers and power cuts do to a conversion, at every operation."""
