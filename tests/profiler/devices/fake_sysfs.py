"""Runs a command that sees AMD cards in /sys: a tree as amdgpu and amdkfd write it, in a mount namespace of its own.

    unshare -m python fake_sysfs.py TREE.json COMMAND...

Run inside the namespace (`unshare -m` as root, `unshare -rm` otherwise): /sys is covered there and nowhere else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def write_properties(folder, values):
    write(folder / "properties", "\n".join(f"{key} {value}" for key, value in values.items()))


def build(tree, sys_root=Path("/sys")):
    nodes = sys_root / "class/kfd/kfd/topology/nodes"
    (sys_root / "class/kfd/kfd/proc").mkdir(parents=True)
    write_properties(nodes / "0", {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0})
    write(nodes / "0" / "gpu_id", 0)
    write(nodes / "0" / "name", "")
    write_properties(nodes / "0" / "io_links" / "0", tree["io_link"] | {"node_from": 0, "node_to": 1})
    for number, card in enumerate(tree["cards"]):
        device = sys_root / "devices/pci0000:00" / card["pci"]
        for name, text in card["device"].items():
            write(device / name, text)
        hwmon = device / "hwmon" / f"hwmon{number}"
        for name, text in card["hwmon"].items():
            write(hwmon / name, text)
        drm = device / "drm" / f"card{number}"
        drm.mkdir(parents=True)
        link(drm / "device", device)
        link(hwmon / "device", device)
        link(sys_root / "class/drm" / f"card{number}", drm)
        link(sys_root / "class/hwmon" / f"hwmon{number}", hwmon)
        node = nodes / str(number + 1)
        write_properties(node, tree["node_defaults"] | card["node"])
        write(node / "gpu_id", 51110 + number)
        write(node / "name", card["node_name"])
        write_properties(node / "io_links" / "0", tree["io_link"] | {"node_from": number + 1})


def main():
    tree = json.loads(Path(sys.argv[1]).read_text())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for folder in ("/sys", "/dev/shm"):  # the library keeps a mutex a card in /dev/shm
        subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    build(tree)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
