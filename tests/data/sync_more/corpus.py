"""More snippets of the kinds found in LLM-serving code, in the form of `../sync_corpus/corpus.py`.

`measured.json` holds what `../sync_corpus/measure.py truth OUT.json THIS_FOLDER` measured of them on an NVIDIA H200
(torch 2.11). A snippet that raises there must raise on the simulated device too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import more_composite  # noqa: F401
import more_copies  # noqa: F401
import more_indexing  # noqa: F401
import more_plain  # noqa: F401
import more_scalar_reads  # noqa: F401
import more_shapes  # noqa: F401
import more_waits  # noqa: F401
from more_cases import CASES

__all__ = ["CASES"]
