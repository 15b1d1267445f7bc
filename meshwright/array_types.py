"""Types of the numbers in formulas, which hold for one layout, message or size, and for many at once."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = float | NDArray[np.float64]
"""A number, or an array of any shape, element by element; arrays in one call broadcast to one shape."""
Index: TypeAlias = int | slice | NDArray[np.intp] | NDArray[np.bool_]
"""What selects entries of an array: a place, a run, places (n,) or a mask of the array's length."""
