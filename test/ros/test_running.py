# SPDX-License-Identifier: Apache-2.0
"""A node's process ends on request, even if something it closes hangs."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

NODE = """
import ctypes, threading, time
from dsd_ros.ros import running
from dsd_ros.ros.running import RunnableNode, run_main, run_node

def hold():
    ctypes.PyDLL(None).sleep(600)  # which keeps the interpreter to itself

class Hanging(RunnableNode):
    def __init__(self):
        super().__init__("hanging")
        self.create_timer(0.01, self.tell)

    def tell(self):  # spun, so what ends it is run_node's
        print("up", flush=True)

    def close(self):
        END

RUN
"""


def run(folder, end, then="run_main(Hanging)"):
    """Exit code and both outputs, the first line gone, of a node that is asked to end."""
    script = folder / "node.py"
    script.write_text(NODE.replace("END", end).replace("RUN", then))
    node = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None and node.stdout.readline() == "up\n"
        node.send_signal(signal.SIGINT)
        told, errors = node.communicate(timeout=60.0)
    finally:
        node.kill()
    return node.returncode, told, errors


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("time.sleep(600)", 1, "it could not close within 0.9 s; ended as it is"), ("hold()", 1, "in hold")],
    ids=["never", "never, and nothing else runs"],
)
def test_a_node_that_does_not_close_is_ended_and_says_so(ros_domain, tmp_path, end, code, said):
    ended, _, errors = run(tmp_path, end)
    assert ended == code, errors
    assert said in errors


def test_a_node_that_closes_ends_without_a_word(ros_domain, tmp_path):
    ended, _, errors = run(tmp_path, "pass", "Hanging.close_s = 3600.0\nrun_main(Hanging)")
    assert (ended, errors) == (0, "")


def test_what_continues_after_a_nodes_end_is_left_alone(ros_domain, tmp_path):
    then = """
Hanging.close_s = 3600.0  # however slow the machine is
code = run_node(Hanging)
waiting = [t for t in threading.enumerate() if isinstance(t, threading.Timer) and not t.finished.is_set()]
print("after", code, waiting)
"""
    code, told, errors = run(tmp_path, "pass", then)
    assert (code, told.splitlines()[-1:]) == (0, ["after 0 []"]), errors
