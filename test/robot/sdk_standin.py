# SPDX-License-Identifier: Apache-2.0
"""A program like sdk_process.py, connected to a stand-in robot; for the tests of the pipes."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from dataclasses import astuple

from dsd_lab.robot.go2_standin import Go2Standin
from dsd_ros.robot.go2.protocol import ServiceRequest
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World


def write(**message) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def run(standin: Go2Standin) -> None:
    while True:
        standin.advance()
        for service, answer in standin.answers():
            *head, binary = astuple(answer)
            write(response=[service, *head, base64.b64encode(binary).decode()])
        write(state=base64.b64encode(standin.state()).decode())
        time.sleep(0.02)


standin = Go2Standin(Simulator(World.from_seed(0)), lying=False, with_path=True)
write(ready={"standin": "1"})
os.write(1, b'no JSON\n[]\n{}\n{"state": "?"}\n{"battery": []}\n\xff\n{"response": [1]}\n"state"\n')
write(battery=0.5)
threading.Thread(target=run, args=(standin,), daemon=True).start()
for line in sys.stdin:
    service, *request = json.loads(line)
    standin.receive(service, ServiceRequest(*request))
