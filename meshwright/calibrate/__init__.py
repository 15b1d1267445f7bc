"""What this machine really does: the times that a calibration is made of."""
