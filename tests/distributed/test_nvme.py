"""Folders of several processes on one disk, for DeepSpeed's offload."""

import subprocess
import sys

HOLD = """
import sys
from pathlib import Path
from fabric_ladder.distributed.nvme import own_folder
folder = own_folder(Path(sys.argv[1]))
(folder / "rank0.swp").write_text("optimizer state")
print(folder.name, flush=True)
input()
"""


def start(parent):
    """Start a process with a folder of its own; return it with the folder."""
    command = [sys.executable, "-c", HOLD, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, parent / process.stdout.readline().strip()


def test_each_process_has_its_own_folder_and_nothing_is_left(tmp_path):
    (tmp_path / "fabric_ladder-notes").mkdir()
    (killed, first), (ended, second) = start(tmp_path), start(tmp_path)
    assert first != second
    killed.kill()
    killed.communicate()
    ended.communicate("\n")
    assert ((first / "rank0.swp").exists(), second.exists()) == (True, False)
    last, third = start(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"fabric_ladder-notes", third.name}
    last.communicate("\n")
    assert [path.name for path in tmp_path.iterdir()] == ["fabric_ladder-notes"], "the user's own folder is kept"
