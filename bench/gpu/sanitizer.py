"""compute-sanitizer over a script: clean, errors, or why it could not look. It never passes what it has not seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
USUAL_PLACE = "/usr/local/cuda/bin/compute-sanitizer"
ERRORS_FOUND = 86  # an exit code that nothing else uses
UNSERVED = ("Device not supported", "LibraryNotLoaded", "Unable to", "Failed to")


def run(script: Path, out: Path, seconds: float, device: str) -> int:
    """`script OUT --quick` under each tool, each in a process. 0: clean, 1: errors found, 4: it could not look."""
    tool = shutil.which("compute-sanitizer") or USUAL_PLACE
    told: dict[str, Any] = {"sanitizer": tool, "tools": {}}
    if device != "cuda":
        told["verdict"] = "not run: no GPU here"
    elif not Path(tool).exists():
        told["verdict"] = "not run: no compute-sanitizer on this machine"
    else:
        share = max(30.0, seconds / len(TOOLS))
        inner = [sys.executable, str(script), str(out.with_suffix(".inner.json")), "--quick"]
        inner += ["--parts", "schedules,numerics", "--seconds", str(share * 0.6)]
        for name in TOOLS:
            told["tools"][name] = _under([tool, "--tool", name, "--error-exitcode", str(ERRORS_FOUND), *inner], share)
        verdicts = {entry["verdict"] for entry in told["tools"].values()}
        told["verdict"] = next((v for v in ("errors", "could not look") if v in verdicts), "clean")
    out.write_text(json.dumps(told, indent=1))
    print("compute-sanitizer:", told["verdict"], {name: entry["verdict"] for name, entry in told["tools"].items()})
    return {"clean": 0, "errors": 1}.get(told["verdict"], 4)


def _under(command: list[str], seconds: float) -> dict[str, Any]:
    """One tool's verdict. A run that failed, or that ended without the tool's summary, proves nothing."""
    # Blocks of their own: in the caching allocator's large ones a read past a tensor's end is not out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"verdict": "could not look", "why": f"not finished in {seconds:.0f} s"}
    lines = (done.stdout + done.stderr).splitlines()
    summary = [line for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    why = next((line for line in lines if any(text in line for text in UNSERVED)), None)
    if done.returncode == ERRORS_FOUND:
        verdict = "errors"
    elif done.returncode == 0 and summary and why is None:
        return {"verdict": "clean", "summary": summary}
    else:
        verdict = "could not look"
    return {"verdict": verdict, "exit": done.returncode, "summary": summary, "why": why, "output": lines[-40:]}
