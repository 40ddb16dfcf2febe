"""AMD devices through the real `librocm_smi64`: without a card, and with cards in a sysfs tree of a mount namespace."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.planner.errors import Unreachable
from syncfree.profiler.devices import kfd, open_monitor, rocm_smi

HERE = Path(__file__).parent
CARDS = HERE / "cards.json"

try:
    rocm_smi.load()
    HAS_LIBRARY = True
except Unreachable:
    HAS_LIBRARY = False

needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="librocm_smi64 is not installed (apt: librocm-smi64-1)")


@pytest.fixture(scope="module")
def in_namespace():
    """Runs Python code where /sys has the cards of `cards.json`; returns what it prints, decoded as JSON."""
    if not HAS_LIBRARY:
        pytest.skip("librocm_smi64 is not installed (apt: librocm-smi64-1): the ROCm path is NOT tested")
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace may be made here: the ROCm path is NOT tested")

    def run(code, cards=CARDS):
        command = [*unshare, sys.executable, str(HERE / "fake_sysfs.py"), str(cards), sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


FACTS = """
import json, msgspec
from syncfree.profiler.devices import device_facts, open_monitor
monitor, reasons = open_monitor()
print(json.dumps({
    "source": monitor.name, "version": monitor.version, "reasons": reasons,
    "facts": [msgspec.structs.asdict(f) for f in monitor.facts()],
    "samples": [msgspec.structs.asdict(s) for s in monitor.sample()],
    "without_pcie": [msgspec.structs.asdict(s) for s in monitor.sample(pcie=False)],
}))
"""


@pytest.fixture(scope="module")
def seen(in_namespace):
    return in_namespace(FACTS)


def test_the_real_library_finds_the_cards(seen):
    assert seen["source"] == "rocm_smi"
    assert len(seen["facts"]) == 2
    assert seen["version"].count(".") == 2


def test_each_card_has_its_name_target_units_memory_and_address(seen):
    assert seen["facts"] == [
        {
            "index": 0,
            "vendor": "amd",
            "name": "AMD Instinct MI300X OAM",
            "arch": "gfx942",
            "compute_units": 304,
            "memory_bytes": 206141652992,
            "pci": "0000:0c:00.0",
        },
        {
            "index": 1,
            "vendor": "amd",
            "name": "AMD Instinct MI250X",
            "arch": "gfx90a",
            "compute_units": 110,
            "memory_bytes": 68702699520,
            "pci": "0000:c1:00.0",
        },
    ]


def test_each_card_has_its_momentary_figures_and_none_where_the_driver_has_none(seen):
    first, second = seen["samples"]
    assert first == {
        "index": 0,
        "utilisation_percent": 87,
        "memory_utilisation_percent": 41,
        "memory_used_bytes": 64424509440,
        "power_watts": 512.0,
        "temperature_celsius": 54.0,
        "pcie_rx_bytes_per_s": 524288 * 256.0,
        "pcie_tx_bytes_per_s": 1048576 * 256.0,
    }
    assert (second["utilisation_percent"], second["power_watts"], second["temperature_celsius"]) == (3, 91.0, 38.0)
    assert second["memory_utilisation_percent"] is None
    assert second["pcie_rx_bytes_per_s"] is None


def test_pcie_can_be_left_out(seen):
    assert seen["without_pcie"][0] == seen["samples"][0] | {"pcie_rx_bytes_per_s": None, "pcie_tx_bytes_per_s": None}


def test_the_planners_environment_follows_the_tree(in_namespace, tmp_path):
    tree = json.loads(CARDS.read_text())
    tree["cards"] = tree["cards"][:1]
    tree["cards"][0]["node"].update(gfx_target_version=90500, simd_count=1024)
    other = tmp_path / "cards.json"
    other.write_text(json.dumps(tree))
    facts = in_namespace(FACTS, other)["facts"]
    assert [(f["arch"], f["compute_units"]) for f in facts] == [("gfx950", 256)]


def test_telemetry_beside_a_profile_comes_from_the_cards(in_namespace):
    code = """
import json
from syncfree.profiler.devices.telemetry import Sampler
with Sampler(interval_s=0.01) as sampler:
    while sampler.taken < 3:
        pass
print(json.dumps(sampler.result()))
"""
    result = in_namespace(code)
    assert result["source"] == "rocm_smi"
    assert result["reason"] is None
    assert result["samples"] >= 3
    first = result["devices"][0]
    assert first["arch"] == "gfx942"
    assert first["utilisation_percent"] == {"mean": 87.0, "max": 87, "last": 87}
    assert first["power_watts"]["mean"] == 512.0
    assert first["pcie_rx_bytes_per_s"]["last"] == 524288 * 256.0
    assert len(first["series"]["t_s"]) == len(first["series"]["power_watts"]) >= 3
    assert result["devices"][1]["memory_utilisation_percent"] is None


@needs_library
@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="there may be a card here")
def test_without_a_card_the_real_library_says_so_and_prints_nothing(capfd):
    with pytest.raises(Unreachable, match="rocm_smi: no AMD card here: "):
        rocm_smi.RocmSmi()
    assert capfd.readouterr() == ("", "")
    monitor, reasons = open_monitor("rocm_smi")
    assert monitor is None
    assert "no AMD card here" in reasons[0]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (90008, "gfx908"),
        (110001, "gfx1101"),
        (100300, "gfx1030"),
    ],
)
def test_gfx_versions_are_named_as_the_compiler_names_them(version, name):
    assert kfd.gfx_target(version) == name


def test_nodes_that_are_no_gpu_or_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_text("cpu_cores_count 8\nsimd_count 0\ngfx_target_version 0\n")
    (tmp_path / "1").mkdir()
    assert kfd.compute_nodes(tmp_path) == {}
    assert kfd.compute_nodes(tmp_path / "none") == {}
