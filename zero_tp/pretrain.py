"""One rank of a training run, as launchers start it: `deepspeed --module zero_tp.pretrain …`."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("pretrain", prog="python -m zero_tp.pretrain")
