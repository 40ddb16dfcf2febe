"""syncfree: plan attention metadata without a device-to-host sync, and prove that a step has none.

`syncfree.planner` needs NumPy and msgspec only; `syncfree.profiler` and `syncfree.backends` import torch when used.
"""

__version__ = "0.1.0"
