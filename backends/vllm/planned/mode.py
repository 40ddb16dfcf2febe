"""What `SYNCFREE_PLANNER` asks for. Imports nothing of weight: every process of vLLM's loads it."""

from __future__ import annotations

import logging
import os
from typing import Literal, TypeAlias

logger = logging.getLogger("syncfree")

Mode: TypeAlias = Literal["off", "shadow", "on"]
VARIABLE = "SYNCFREE_PLANNER"
_MODES: dict[str, Mode] = {"off": "off", "shadow": "shadow", "on": "on"}


def mode_from_environment() -> Mode:
    """`SYNCFREE_PLANNER` of this process; anything unknown is off, and says so."""
    asked = os.environ.get(VARIABLE, "").strip().lower() or "off"
    if asked in _MODES:
        return _MODES[asked]
    logger.warning("syncfree: %s: expected off, shadow or on, got %r: the planner stays off", VARIABLE, asked)
    return "off"
