# SPDX-License-Identifier: Apache-2.0
"""A verifier in its own network namespace, behind a link proxy that all addresses of the namespace reach.

Started by namespace_robot.py, which tells it on standard input what to do, a line of JSON each:
    {"run": ["ip", ...]}          run a command in this namespace; answers its exit code and output
    {"loss": 0.03, ...}           set the proxy's conditions; answers 0
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from table_model import TableModel  # noqa: E402

from dsd_lab.links.emulation import LinkProfile  # noqa: E402
from dsd_lab.links.proxy import Conditions, LinkProxy  # noqa: E402
from dsd_ros.cloud.engine import VerifierEngine  # noqa: E402
from dsd_ros.cloud.server import VerifierServer  # noqa: E402
from dsd_ros.cloud.settings import VerifierSettings  # noqa: E402


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with (
        VerifierEngine(TableModel(4, 12, ends=False)) as engine,
        VerifierServer(engine, VerifierSettings(host="127.0.0.1", port=0)) as server,
        LinkProxy(("127.0.0.1", int(server.url.rpartition(":")[2])), ("0.0.0.0", 0)) as proxy,
    ):
        print(json.dumps({"port": proxy.port}), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(json.loads(line), proxy)), flush=True)


def obey(order: dict, proxy: LinkProxy) -> dict:
    if "run" in order:
        done = subprocess.run(order["run"], capture_output=True, text=True)
        return {"code": done.returncode, "said": done.stderr.strip()}
    loss = order.pop("loss")
    proxy.set(Conditions(LinkProfile(**order), loss))
    return {"code": 0, "lost": proxy.lost_segments}


if __name__ == "__main__":
    main()
