"""What is installed, what each collector can see on this machine, and how to mend what is missing.

Everything that could fail on a broken installation (importing torch, loading a management library) is done in a process
of its own; nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import __version__
from ..errors import Unreachable
from .devices import Look, look_aside

FORMAT = "syncfree.doctor/1"
State = Literal["ok", "limited", "missing", "broken"]
TESTED: dict[str, tuple[str, ...]] = {"torch": ("2.11", "2.13"), "vllm": ("0.26", "0.32")}
SIMULATED_TORCH = (2, 13)
# library, device node, how to get the one, how to get the other
_DRIVERS = {
    "cuda": ("libcuda.so", "/dev/nvidiactl", "install the NVIDIA driver", "in a container: --gpus all"),
    "hip": (
        "libamdhip64.so",
        "/dev/kfd",
        "install the ROCm runtime",
        "load the amdgpu driver; in a container: --device /dev/kfd --device /dev/dri",
    ),
}
_OPTIONAL = {
    "frida": ("frida", "pip install 'syncfree[probe]'", "the probe"),
    "plotly": ("plotly", "pip install 'syncfree[html]'", "HTML reports"),
    "prometheus_client": ("prometheus-client", "pip install 'syncfree[prometheus]'", "watch --prometheus"),
    "triton": ("triton", "comes with torch's GPU builds", "Triton kernels"),
}
_ASK_TORCH = """
import json, torch
about = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "available": torch.cuda.is_available(), "devices": []}
if about["available"]:
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        arch = getattr(p, "gcnArchName", "") if about["hip"] else f"sm_{p.major}{p.minor}"
        about["devices"].append({"name": p.name, "arch": arch.split(":")[0], "units": p.multi_processor_count})
print(json.dumps(about))
"""


class Finding(msgspec.Struct, kw_only=True):
    """One thing looked at. `mend` says what to do where it is not "ok"."""

    section: str  # software, driver, rights, devices
    name: str
    state: State
    found: str
    mend: str = ""


class CollectorFinding(msgspec.Struct, kw_only=True):
    """A way of seeing device calls: whether it works here, what it can tell, what it cannot."""

    name: str
    usable: bool
    sees: list[str]
    blind: str
    reason: str = ""  # why not, where not usable
    mend: str = ""


class Torch(msgspec.Struct, kw_only=True):
    """What torch says of itself; `error` where it cannot be imported."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    available: bool = False
    devices: list[dict[str, Any]] = msgspec.field(default_factory=list)
    error: str | None = None

    def at_least(self, wanted: tuple[int, int]) -> bool:
        numbers = re.findall(r"\d+", self.version or "")[:2]
        return tuple(map(int, numbers)) >= wanted


class Checkup(msgspec.Struct, kw_only=True):
    """Everything `syncfree doctor` tells. `auto`: the collector that `collectors="auto"` would take here, if any."""

    format: str = FORMAT
    syncfree: str = __version__
    python: str = ""
    system: str = ""
    vendor: str | None = None  # cuda, hip, or None without a GPU
    findings: list[Finding] = msgspec.field(default_factory=list)
    collectors: list[CollectorFinding] = msgspec.field(default_factory=list)
    auto: str | None = None
    devices: Look = msgspec.field(default_factory=Look)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def examine() -> Checkup:
    """Look at everything. Takes as long as importing torch in another process does; never raises for what it finds."""
    torch = ask_torch()
    look = look_aside()
    checkup = Checkup(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        vendor=_vendor(torch, look),
        devices=look,
    )
    checkup.findings = [
        *_software(torch),
        *(_driver(vendor) for vendor in _DRIVERS),
        *_rights(),
        *_devices(torch, look),
    ]
    checkup.collectors = _collectors(torch)
    usable = [item.name for item in checkup.collectors if item.usable]
    checkup.auto = next((name for name in ("probe", "kineto") if name in usable), None)
    return checkup


def ask_torch(timeout_s: float = 120.0) -> Torch:
    """Ask torch, in a process of its own, what it is and what it sees."""
    if find_spec("torch") is None:
        return Torch(error="not installed")
    try:
        result = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"importing it did not end within {timeout_s:g} s")
    if result.returncode:
        said = result.stderr.strip().splitlines()
        return Torch(error=said[-1] if said else f"importing it ended with {result.returncode}")
    return msgspec.convert(json.loads(result.stdout.splitlines()[-1]), Torch)


def _vendor(torch: Torch, look: Look) -> str | None:
    if torch.available:
        return "hip" if torch.hip else "cuda"
    if look.devices:
        return "hip" if look.devices[0].vendor == "amd" else "cuda"
    return None


# ------------------------------------------------------------------ software


def _software(torch: Torch) -> list[Finding]:
    findings = [_torch_finding(torch)]
    names = metadata.packages_distributions()
    for package in ("vllm", "aiter"):
        findings.append(_library(package, names.get(package, ())))
    for module, (distribution, mend, use) in _OPTIONAL.items():
        version = _version(distribution) or ("version unknown" if find_spec(module) else None)
        state: State = "ok" if version else "missing"
        found = version or f"not installed: {use} cannot be used"
        findings.append(
            Finding(section="software", name=module, state=state, found=found, mend="" if version else mend)
        )
    return findings


def _torch_finding(torch: Torch) -> Finding:
    if torch.error:
        missing = torch.error == "not installed"
        return Finding(
            section="software",
            name="torch",
            state="missing" if missing else "broken",
            found=torch.error if missing else f"cannot be imported: {torch.error}",
            mend="pip install 'syncfree[torch]'",
        )
    build = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    sees = f"sees {len(torch.devices)} GPU{'s' * (len(torch.devices) != 1)}" if torch.available else "sees no GPU"
    return Finding(section="software", name="torch", state="ok", found=f"{torch.version}, {build}, {sees}")


def _library(package: str, distributions: Sequence[str]) -> Finding:
    """vLLM and aiter go by several distribution names: found by the package they bring."""
    version = next((v for name in distributions if (v := _version(name))), None)
    tested = TESTED.get(package, ())
    if version is None:
        return Finding(
            section="software", name=package, state="missing", found="not installed (only needed to serve with it)"
        )
    known = any(version == t or version.startswith(f"{t}.") for t in tested)
    name = f"{version} ({distributions[0]})"
    if not tested:
        return Finding(section="software", name=package, state="ok", found=name)
    if known:
        return Finding(section="software", name=package, state="ok", found=f"{name}, tested")
    return Finding(
        section="software",
        name=package,
        state="limited",
        found=f"{name}, not tested",
        mend=f"tested with {package} {' and '.join(tested)}; others are tried, and say so where they differ",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------ driver and rights


def _driver(vendor: str) -> Finding:
    prefix, node, mend, mend_node = _DRIVERS[vendor]
    paths = find_library(prefix)
    device = Path(node)
    if not paths:
        return Finding(section="driver", name=prefix, state="missing", found="not found", mend=mend)
    if not device.exists():
        found = f"{paths[0]}, but no {node}: no card or no driver"
        return Finding(section="driver", name=prefix, state="limited", found=found, mend=mend_node)
    if not os.access(device, os.R_OK | os.W_OK):
        who = "join the groups render and video" if vendor == "hip" else "ask for access to it"
        return Finding(
            section="driver", name=prefix, state="limited", found=f"{paths[0]}, but {node} may not be opened", mend=who
        )
    return Finding(section="driver", name=prefix, state="ok", found=paths[0])


def find_library(prefix: str) -> list[str]:
    """Files of a shared library, without loading it: of this process, the linker's cache and path, ROCm and torch."""
    found: dict[str, None] = {}
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.rpartition(" ")[2]
            if Path(path).name.startswith(prefix):
                found[path] = None
    try:
        cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        cache = ""
    for line in cache.splitlines():
        if line.strip().startswith(prefix):
            found[line.rpartition("=> ")[2].strip()] = None
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), os.environ.get("ROCM_PATH", "/opt/rocm") + "/lib"]
    spec = find_spec("torch")
    folders += [f"{place}/lib" for place in (spec.submodule_search_locations or ())] if spec else []
    for folder in filter(None, folders):
        for file in sorted(Path(folder).glob(f"{prefix}*")):
            found[str(file)] = None
    return list(found)


def _rights() -> list[Finding]:
    if sys.platform != "linux":
        return [Finding(section="rights", name="attach", state="missing", found="attaching works on Linux only")]
    from .probe.permission import why_not

    refused = why_not()
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    capable = bool(int(_status("CapEff") or "0", 16) & 1 << 19)
    container = in_container()
    yama = f"Yama scope {scope}" if scope else "no Yama"
    facts = [yama, f"{'has' if capable else 'no'} CAP_SYS_PTRACE"]
    facts += [f"in a container ({container})"] if container else []
    facts += ["seccomp filter on"] if _status("Seccomp") == "2" else []
    own = Finding(
        section="rights",
        name="attach to this process",
        state="missing" if refused else "ok",
        found=f"{refused} ({', '.join(facts)})" if refused else ", ".join(facts),
        mend=_mend_refusal(refused, container) if refused else "",
    )
    return [own, _other_processes(scope, capable, refused, container)]


def _other_processes(scope: str, capable: bool, refused: str | None, container: str) -> Finding:
    """Whether a running server may be attached to by pid."""
    name = "attach to a running server"
    if refused:
        return Finding(
            section="rights", name=name, state="missing", found=refused, mend=_mend_refusal(refused, container)
        )
    if capable:
        return Finding(section="rights", name=name, state="ok", found="any process of any user")
    if scope == "1":
        return Finding(
            section="rights",
            name=name,
            state="limited",
            found="Yama scope 1: only children of this process, or servers that allow it (those with the plugin do)",
            mend="run syncfree as root, or sysctl kernel.yama.ptrace_scope=0",
        )
    return Finding(section="rights", name=name, state="ok", found="processes of the same user")


def _mend_refusal(refused: str | None, container: str) -> str:
    text = refused or ""
    if "frida" in text:
        return "pip install 'syncfree[probe]'"
    if "seccomp" in text or container:
        return "start the container with --cap-add=SYS_PTRACE (Kubernetes: securityContext.capabilities.add)"
    if "ptrace_scope" in text:
        return "sysctl kernel.yama.ptrace_scope=1, or run as root"
    if "dumpable" in text:
        return "start it as the user that profiles, without changing its user id"
    return "use --collectors kineto instead"


def in_container() -> str:
    """The kind of container this runs in, as far as the usual marks tell; empty outside."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    kinds = ("docker", "kubepods", "containerd", "lxc")
    return next((kind for kind in kinds if kind in _read("/proc/1/cgroup")), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _status(name: str) -> str:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


# ------------------------------------------------------------------ devices and collectors


def _devices(torch: Torch, look: Look) -> list[Finding]:
    findings = [
        Finding(
            section="devices",
            name=f"GPU {facts.index}",
            state="ok",
            found=", ".join(
                part
                for part in (
                    facts.name,
                    facts.arch or "",
                    f"{facts.compute_units} compute units" if facts.compute_units else "",
                    f"{facts.memory_bytes / (1 << 30):.0f} GiB" if facts.memory_bytes else "",
                    f"by {look.source} {look.version}",
                )
                if part
            ),
        )
        for facts in look.devices
    ]
    if torch.available and look.devices and len(torch.devices) != len(look.devices):
        hidden = "HIP_VISIBLE_DEVICES" if torch.hip else "CUDA_VISIBLE_DEVICES"
        text = f"torch sees {len(torch.devices)} of {len(look.devices)}"
        findings.append(
            Finding(section="devices", name="visible to torch", state="limited", found=text, mend=f"see {hidden}")
        )
    for reason in look.reasons:
        name, _, text = reason.partition(": ")
        what, _, mend = text.partition(": install ")
        findings.append(
            Finding(
                section="devices",
                name=name,
                state="missing",
                found=what,
                mend=f"install {mend}, to read utilisation, power and memory" if mend else "",
            )
        )
    return findings


def _collectors(torch: Torch) -> list[CollectorFinding]:
    from .collectors import NAMES, make

    findings = []
    for name in NAMES:
        try:
            collector = make(name)
        except (ImportError, Unreachable) as error:
            findings.append(CollectorFinding(name=name, usable=False, sees=[], blind="", reason=str(error)))
            continue
        reason, mend = _why_unusable(name, torch)
        findings.append(
            CollectorFinding(
                name=name,
                usable=not reason,
                sees=sorted(collector.sees),
                blind=collector.blind,
                reason=reason,
                mend=mend,
            )
        )
    return findings


def _why_unusable(name: str, torch: Torch) -> tuple[str, str]:
    """Why a collector cannot work in a process like this one, and what to do; ("", "") where it can."""
    if torch.error:
        return f"torch: {torch.error}", "pip install 'syncfree[torch]'"
    if name == "simulated":
        if torch.at_least(SIMULATED_TORCH):
            return "", ""
        return f"needs torch >= 2.13, this is {torch.version}", "pip install -U torch"
    if not torch.available:
        return "torch sees no GPU", "run on a machine with one, or test on the simulated device"
    if name == "probe":
        from .probe.permission import why_not

        refused = why_not()
        return (refused, _mend_refusal(refused, in_container())) if refused else ("", "")
    return "", ""
