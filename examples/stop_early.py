from zero_tp import Callback, TrainState
from zero_tp.pretrain import main


class StopEarly(Callback):
    """Save a checkpoint and stop once the loss is below a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_step_end(self, state: TrainState) -> None:
        if state.engine.loss < self.limit:
            state.print(f"step {state.step}: the loss is below {self.limit}")
            state.requests.stop = True


if __name__ == "__main__":
    main(callbacks=[StopEarly(5.0)])
