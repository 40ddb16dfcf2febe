"""Which frame is to blame."""

import subprocess
import sys
from pathlib import Path

import syncfree
from syncfree.profiler.calls import Frame
from syncfree.profiler.sites import OWN, blamed, is_foreign


def test_the_innermost_frame_outside_torch_and_this_package_is_blamed():
    own = f"{OWN[0]}session.py"
    stack = [Frame(own, 1, "f"), Frame("/x/site-packages/torch/_tensor.py", 2, "g"), Frame("/app/a.py", 3, "h")]
    assert blamed(stack) == stack[2]
    assert blamed(stack[:2]) == stack[0]
    assert blamed([]) is None


def test_a_user_project_that_mentions_torch_in_its_name_is_foreign():
    assert is_foreign("/home/me/mytorch/a.py")
    assert not is_foreign("/home/me/torch/a.py")


def test_a_package_imported_through_a_link_knows_its_own_frames(tmp_path):
    link = tmp_path / "syncfree"
    link.symlink_to(Path(syncfree.__file__).parent, target_is_directory=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from syncfree.profiler import session, sites\n"
        "assert session.__file__.startswith(sys.argv[1]), session.__file__\n"
        "assert not sites.is_foreign(session.__file__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
