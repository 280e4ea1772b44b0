"""How a person starts launch/pretrain.py on two machines of two ranks each, by every launcher."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cluster.nodes import SHARED, Node, Rack
from tests.cluster.slurm import VARIABLES
from tests.support.launched import ROOT, free_port, furnish
from tests.support.waits import patience

SCRIPT = str(ROOT / "launch/pretrain.py")
HOSTFILE = f"{SHARED}/hostfile"


class Ended(NamedTuple):
    """A launch has ended: the exit status of each command that started it, and what they
    printed.
    """

    statuses: list[int]
    output: str


class Launch:
    """A launch runs on its nodes: the commands that a person would type there, one each.

    Args:
        nodes: those of the commands, by default the first ones of the rack.
    """

    def __init__(
        self,
        rack: Rack,
        commands: Sequence[Sequence[str]],
        variables: dict[str, str] | None = None,
        nodes: Sequence[Node] | None = None,
    ) -> None:
        self.files = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115 - as long as the launch
        self.processes = [
            node.start(*words, variables=variables, output=file)
            for node, words, file in zip(nodes or rack.nodes, commands, self.files, strict=False)
        ]

    def output(self, of: int | None = None) -> str:
        """Return what the commands have printed until now; `of`: one of them."""
        text = ""
        for file in self.files if of is None else [self.files[of]]:
            file.seek(0)
            text += file.read()
        return text

    def ended(self, limit: float = 180) -> Ended:
        """Wait for the end; `limit`: seconds of an idle machine."""
        for process in self.processes:
            try:
                process.wait(patience(limit))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it goes on:\n{self.output()}") from None
        return Ended([process.returncode for process in self.processes], self.output())


Start = Callable[..., Launch]


def alone(
    rack: Rack, *words: str, node: int = 0, variables: dict[str, str] | None = None
) -> Launch:
    """Four ranks on one machine."""
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "4"]
    command = [*runner, "--master_port", str(free_port()), SCRIPT, *words]
    return Launch(rack, [command], variables, [rack.nodes[node]])


def pdsh(rack: Rack, *words: str) -> Launch:
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", HOSTFILE]
    return Launch(rack, [[*runner, "--master_port", str(free_port()), SCRIPT, *words]])


def no_ssh(rack: Rack, *words: str) -> Launch:
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", HOSTFILE, "--no_ssh"]
    runner += ["--master_addr", "node1", "--master_port", str(free_port())]
    first, second = ([*runner, "--node_rank", str(number), SCRIPT, *words] for number in range(2))
    return Launch(rack, [first, second])


def torchrun(rack: Rack, *words: str, program: str = SCRIPT) -> Launch:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "2",
    ]
    start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"node1:{free_port()}", "--rdzv_id", "1"]
    start += ["--rdzv_conf", "join_timeout=60,read_timeout=60"]
    return Launch(rack, [[*start, program, *words]] * 2)


def agent(rack: Rack, number: int, port: int, *words: str) -> Launch:
    """torchrun's elastic agent of two ranks on one of one or two machines, as docs/training.md
    has it.
    """
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1:2",
        "--nproc_per_node",
        "2",
    ]
    start += ["--max-restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"node1:{port}"]
    start += [
        "--rdzv_id",
        "1",
        "--rdzv_conf",
        "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5",
    ]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Launch(rack, [[*start, SCRIPT, *words]], variables, [rack.nodes[number]])


def accelerate(rack: Rack, *words: str) -> Launch:
    """`--multi_gpu` is accelerate's name for torchrun: without it ranks on CPUs are started by
    mpirun alone.
    """
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_machines",
        "2",
    ]
    start += ["--num_processes", "4", "--mixed_precision", "no", "--dynamo_backend", "no"]
    start += ["--main_process_ip", "node1", "--main_process_port", str(free_port())]
    return Launch(
        rack, [[*start, "--machine_rank", str(number), SCRIPT, *words] for number in range(2)]
    )


def srun(rack: Rack, *words: str, options: Sequence[str] = (), program: str = SCRIPT) -> Launch:
    variables = {**VARIABLES, "MASTER_ADDR": "node1", "MASTER_PORT": str(free_port())}
    start = ["srun", "--nodes=2", "--ntasks-per-node=2", *options, sys.executable, program]
    return Launch(rack, [[*start, *words]], variables)


def sbatch(rack: Rack, *words: str, options: Sequence[str] = ()) -> Launch:
    """Submit the shipped batch script; the launch's output is the job's."""
    file = f"{SHARED}/job.out"
    rack.nodes[0].seen(Path(file)).unlink(missing_ok=True)
    start = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-node=0",
        f"--output={file}",
        *options,
    ]
    follow = f'cd {SHARED}; "$@"; status=$?; cat {file}; exit $status'
    words = (*start, f"--chdir={SHARED}", f"{SHARED}/slurm.sbatch", *words)
    return Launch(rack, [["bash", "-c", follow, "-", *words]], VARIABLES)


STARTS: dict[str, Start] = {
    "deepspeed, pdsh": pdsh,
    "deepspeed, no ssh": no_ssh,
    "torchrun": torchrun,
    "accelerate": accelerate,
    "srun": srun,
    "sbatch": sbatch,
}


def workplace(rack: Rack) -> Path:
    """Put corpus, config, hostfile and the repository's launch/ into the shared directory → the
    directory from here.
    """
    directory = rack.nodes[0].seen(SHARED)
    # A process outside can't work in the directory of a namespace.
    with tempfile.TemporaryDirectory() as made:
        shutil.copytree(furnish(Path(made)), directory, symlinks=True, dirs_exist_ok=True)
    (directory / "launch").symlink_to(ROOT / "launch")
    (directory / "slurm.sbatch").write_bytes((ROOT / "launch/slurm.sbatch").read_bytes())
    (directory / "hostfile").write_text("node1 slots=2\nnode2 slots=2\n")
    (directory / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    config = json.loads((directory / "small.json").read_text())
    config["scheduler"]["params"]["total_num_steps"] = 8
    del config["csv_monitor"]
    (directory / "small.json").write_text(json.dumps(config))
    return directory
