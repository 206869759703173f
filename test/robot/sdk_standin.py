"""A program like sdk_process.py with the stand-in robot behind it, for the tests of the pipes."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time

from dsd_ros.robot.go2.protocol import ServiceRequest
from dsd_ros.robot.go2.standin import Go2Standin
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World


def tell(**message) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def run(standin: Go2Standin) -> None:
    while True:
        standin.advance()
        for service, answer in standin.answers():
            tell(
                service=service, id=answer.identity, api_id=answer.api_id, code=answer.code,
                data=answer.data, binary=base64.b64encode(answer.binary).decode(),
            )  # fmt: skip
        tell(state=base64.b64encode(standin.state()).decode())
        time.sleep(0.02)


standin = Go2Standin(Simulator(World.from_seed(0)), lying=False, with_path=True)
tell(ready={"standin": "1"})
os.write(1, b'no JSON\n[]\n{}\n{"state": "?"}\n{"battery": []}\n\xff\n{"id": 1}\n')
tell(battery=0.5)
threading.Thread(target=run, args=(standin,), daemon=True).start()
for line in sys.stdin:
    m = json.loads(line)
    standin.receive(m["service"], ServiceRequest(m["id"], m["api_id"], m["parameter"], m["noreply"]))
