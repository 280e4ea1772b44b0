"""One rank of an evaluation, as launchers start it: `deepspeed --module zero_tp.evaluate …`."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("evaluate", prog="python -m zero_tp.evaluate")
