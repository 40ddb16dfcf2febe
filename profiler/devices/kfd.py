"""AMD compute nodes as the kernel driver lists them: gfx target and compute units, without any library.

Source: Linux `drivers/gpu/drm/amd/amdkfd/kfd_topology.c`, exported under /sys/class/kfd/kfd/topology/nodes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .facts import pci_address

NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class ComputeNode(msgspec.Struct, frozen=True):
    pci: str
    gfx: str
    compute_units: int


def gfx_target(version: int) -> str:
    """The name of a `gfx_target_version` (major * 10000 + minor * 100 + stepping): 90402 is gfx942, 90010 gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def compute_nodes(root: Path = NODES) -> dict[str, ComputeNode]:
    """GPU nodes by PCI address; empty where there is no driver. Nodes that may not be read are left out."""
    found = {}
    for folder in sorted(root.glob("[0-9]*")):
        try:
            text = (folder / "properties").read_text()
        except OSError:
            continue  # a container may see only some of the nodes
        values = {
            key: int(value) for key, value in (line.split() for line in text.splitlines() if len(line.split()) == 2)
        }
        if not values.get("gfx_target_version") or not values.get("simd_per_cu"):
            continue  # a CPU node
        where = values.get("location_id", 0)
        pci = pci_address(values.get("domain", 0), where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7)
        found[pci] = ComputeNode(
            pci, gfx_target(values["gfx_target_version"]), values["simd_count"] // values["simd_per_cu"]
        )
    return found
