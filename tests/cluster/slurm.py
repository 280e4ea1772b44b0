"""A real Slurm on the nodes of a rack: the controller on the first, a daemon on each."""

from __future__ import annotations

from tests.cluster.nodes import Node, Rack
from tests.support.waits import wait_until

SETTINGS = {
    "ClusterName": "rack",
    "SlurmctldHost": "node1",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "StateSaveLocation": "/run/slurm/state",
    "SlurmdSpoolDir": "/run/slurm/spool",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd.pid",
    "SlurmctldLogFile": "/run/slurm/slurmctld.log",
    "SlurmdLogFile": "/run/slurm/slurmd.log",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "SlurmdParameters": "config_overrides",  # the machine may have fewer cores
    "ReturnToService": "2",
    "KillWait": "30",
    "SlurmdTimeout": "40",  # the default is 300
    "SlurmdDebug": "debug2",  # it logs each request
    "AuthInfo": "cred_expire=10",  # a job waits as long before it starts again, by default 120
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2",
}
VARIABLES = {"SLURM_CONF": "/run/slurm/slurm.conf"}


def serve(node: Node) -> None:
    """Start the daemon of a node."""
    node.shell(f"SLURM_CONF={VARIABLES['SLURM_CONF']} slurmd -N {node.name}")


def start(rack: Rack) -> None:
    """Start munge and Slurm on every node, and wait until it takes jobs."""
    lines = [f"{key}={value}" for key, value in SETTINGS.items()]
    lines += [
        f"NodeName={node.name} NodeAddr={node.address} CPUs=4 RealMemory=4000"
        for node in rack.nodes
    ]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    rack.shell("head -c 64 /dev/urandom > /mnt/munge.key; chmod 600 /mnt/munge.key")
    for node in rack.nodes:
        controller = "slurmctld" if node is rack.nodes[0] else ":"
        text = "\n".join(lines)
        node.shell(
            f"""
            export SLURM_CONF={VARIABLES["SLURM_CONF"]}
            mkdir -p -m 755 /run/munge /run/slurm/state /run/slurm/spool
            echo '{text}' > $SLURM_CONF
            munged --key-file=/mnt/munge.key --log-file=/run/munge/log --pid-file=/run/munge/pid \
                --seed-file=/run/munge/seed --force
            {controller}
            """
        )
        serve(node)
    first = rack.nodes[0]

    def ready() -> bool:
        states = first.run("sinfo", "-h", "-N", "-o", "%T", variables=VARIABLES).stdout.split()
        return states == ["idle"] * len(rack.nodes)

    def logs() -> str:
        return "".join(node.shell("tail -n 20 /run/slurm/*.log") for node in rack.nodes)

    wait_until(ready, 30, logs, 0.2)
