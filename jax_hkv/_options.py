"""What options and arguments may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Bool, Float, Int32

# How the rows of a bag become one.
Combiner = Literal["sum", "mean", "sqrtn"]

# What an id without a row is given.
Fill = float | Literal["initial"]

# Paths of tables; None for all.
Only = str | Iterable[str] | None

# Rows, flags and numbers, of a device or of the host, traced if need be.
Arrays = Array | np.ndarray
Flag = bool | np.bool_ | Bool[Array, ""] | Bool[np.ndarray, ""]
Number = float | np.floating[Any] | Float[Array, ""] | Float[np.ndarray, ""]

# How many: of a device, or read from it.
Count = Int32[Array, ""] | Int32[np.ndarray, ""] | np.int32
