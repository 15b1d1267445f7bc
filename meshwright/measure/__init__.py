"""What the machine at hand really does: the times that a calibration is made of."""
