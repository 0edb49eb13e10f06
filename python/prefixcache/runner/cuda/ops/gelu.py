"""The numbers of GELU's tanh form, which all forms of the op share.

(1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) with 2u = GELU_SLOPE * (x + GELU_CUBE * x^3).
"""

from __future__ import annotations

import math

GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715
