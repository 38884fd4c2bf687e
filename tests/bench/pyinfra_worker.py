"""pyinfra as a contestant of the scale benchmark. Run by the Python of an environment that has it
(BENCH_PYINFRA_PYTHON), from this file alone: nothing of ours is installed there.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before all else, as pyinfra's own command does

import json  # noqa: E402 - as above
import os  # noqa: E402 - as above
import resource  # noqa: E402 - as above
import sys  # noqa: E402 - as above
import time  # noqa: E402 - as above
from pathlib import Path  # noqa: E402 - as above


class Pyinfra:
    """A deployment is pyinfra's own: each file is put if it differs, then the trial is run. Other
    tasks are plain commands, without an operation around them."""

    def open(self, boards):
        from pyinfra.api import Config, Inventory, State
        from pyinfra.api.connect import connect_all

        self.boards = boards
        hosts = [
            (
                name,
                {
                    "ssh_hostname": board["host"],
                    "ssh_port": board["port"],
                    "ssh_user": board["user"],
                    "ssh_key": board["key_file"],
                    "ssh_known_hosts_file": board["known_hosts"],
                    "ssh_strict_host_key_checking": "yes",
                    "ssh_allow_agent": False,
                    "ssh_look_for_keys": False,
                },
            )
            for name, board in boards.items()
        ]
        self.state = State(Inventory((hosts, {})), Config(PARALLEL=len(hosts)))
        connect_all(self.state)
        self._all_there()

    def do(self, task, command):
        if task == "deploy":
            self._deploy()
        else:
            self._on_each(lambda host: self._run(host, command))
        self._all_there()

    def close(self):
        from pyinfra.api.connect import disconnect_all

        disconnect_all(self.state)

    def _deploy(self):
        from pyinfra.api.operation import add_op
        from pyinfra.api.operations import run_ops
        from pyinfra.context import ctx_state
        from pyinfra.operations import files, server

        first = next(iter(self.boards.values()))

        def prepare(host):
            for path in map(Path, first["files"]):
                name = f"pyinfra-work/{path.name}"
                add_op(self.state, files.put, src=str(path), dest=name, host=host)
            add_op(self.state, server.shell, commands=[first["trial"]], host=host)

        with ctx_state.use(self.state):  # one for all greenlets: each would end the others'
            self._on_each(prepare)
            run_ops(self.state)

    def _on_each(self, work):
        hosts = list(self.state.inventory.get_active_hosts())
        for started in [self.state.pool.spawn(work, host) for host in hosts]:
            started.get()

    @staticmethod
    def _run(host, command):
        good, output = host.run_shell_command(command)
        if not good:
            raise RuntimeError(f"{host.name}: {output.stderr}")

    def _all_there(self):
        there = len(self.state.active_hosts)
        if there != len(self.boards):
            raise RuntimeError(f"{there} of {len(self.boards)} boards are left")


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contestant = Pyinfra()
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        try:
            if request["do"] == "open":
                contestant.open(request["boards"])
            elif request["do"] == "task":
                contestant.do(request["task"], request["command"])
            else:
                contestant.close()
            reply = {"ok": True, "seconds": time.perf_counter() - begin}
        except Exception as error:
            reply = {"ok": False, "kind": type(error).__name__, "message": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
