"""Time and memory of a layout: one set of formulas for a single layout and for arrays of thousands."""
