"""What options are called that are texts."""

from __future__ import annotations

from typing import Literal

# How the rows of a bag become one.
Combiner = Literal["sum", "mean", "sqrtn"]

# What an id without a row is given.
Fill = float | Literal["initial"]
