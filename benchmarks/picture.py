#!/usr/bin/env python3
"""Draw the README's picture from the newest dated results: equal losses, less memory, and the speed
of peers.

python benchmarks/picture.py docs/picture.png
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
BLUE, RED, GREEN, GREY = "#4477AA", "#EE6677", "#228833", "#BBBBBB"  # Paul Tol's "bright" scheme
MIB = 2**20
PEERS = {
    "ztp-sp / dtensor": "PyTorch DTensor\nTP 2",
    "ztp-sp / autotp-vp": "DeepSpeed AutoTP\nTP 2",
    "ztp-sp / mcore-sp": "Megatron-core\nTP 2, SP",
    "ztp-z2 / ds-z2": "HF in DeepSpeed\nZeRO-2",
    "ztp-z1-1p / hf-1p": "Hugging Face\n1 process",
}
LAYERS = {"TP 1": "TP 1 × DP 1", "TP 4": "TP 4 × DP 1", "TP 4, SP": "TP 4 × DP 1, SP"}


def newest(name: str) -> dict[str, Any]:
    """Return the newest result of a benchmark."""
    files = sorted(RESULTS.glob(f"*-{name}.json"))
    if not files:
        sys.exit(f"error: {RESULTS} has no {name}: run the benchmark that writes it")
    result: dict[str, Any] = json.loads(files[-1].read_text())
    return result


def same_model(axes: Axes) -> None:
    result = newest("same-model")
    ours = result["losses"]["parallel"]
    theirs = result["losses"]["plain"]
    steps = range(1, len(ours) + 1)
    axes.plot(steps, theirs, color=GREY, linewidth=5, label="transformers, one process")
    axes.plot(steps, ours, color=BLUE, linewidth=1.3, label="zero_tp, TP 2 × DP 2, SP, ZeRO-3")
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    unit = 10.0 ** math.floor(math.log10(apart))
    axes.set(xlabel="step", ylabel="training loss", title="The same model")
    axes.legend(frameon=False, loc="upper right")
    axes.annotate(
        f"never more than {math.ceil(apart / unit) * unit:.0e} apart",
        (0.975, 0.75),
        xycoords="axes fraction",
        ha="right",
        color="#444444",
    )


def less_memory(axes: Axes) -> None:
    rows = {
        (row["parallel"], row["row"]): row["measured"] / MIB
        for row in newest("activation-memory")["layer_bytes"]
    }
    # As the paper's table names them.
    kinds = {"nothing recomputed": BLUE, "selective": GREEN, "full": RED}
    for number, (kind, colour) in enumerate(kinds.items()):
        heights = [rows[parallel, kind] for parallel in LAYERS.values()]
        places = [place + 0.27 * (number - 1) for place in range(len(LAYERS))]
        bars = axes.bar(places, heights, 0.25, color=colour, label=kind.removesuffix(" recomputed"))
        axes.bar_label(bars, [f"{height:.2g}" for height in heights], padding=1, fontsize=8)
    axes.set_xticks(range(len(LAYERS)), list(LAYERS))
    axes.set(ylabel="activations of a layer [MiB a rank]", title="In less memory")
    axes.legend(frameon=False, title="recomputed:", alignment="left")


def beside_peers(axes: Axes) -> None:
    ratios = newest("peers-wide-bf16")["ratios"]
    for place, name in enumerate(reversed(PEERS)):
        for key, colour, shift in (("tokens_per_second", BLUE, 0.19), ("peak_memory", RED, -0.19)):
            middle, least, most = ratios[name][key]
            axes.barh(place + shift, middle, 0.35, color=colour)
            axes.plot([least, most], [place + shift] * 2, color="#222222", linewidth=0.9)
            axes.annotate(
                f"{middle:.2f}", (0.03, place + shift), va="center", color="white", fontsize=8
            )
    axes.axvline(1, color="#222222", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(PEERS)), list(reversed(PEERS.values())))
    axes.set(
        title="Beside its peers",
        xlabel="of the peer's, median and range of 3 rounds",
        xlim=(0, 1.65),
    )
    for colour, words in ((BLUE, "tokens/s"), (RED, "peak memory")):
        axes.barh(0, 0, color=colour, label=words)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.42, -0.13))


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
    for draw, axes in zip((same_model, less_memory, beside_peers), panels, strict=True):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[1], dpi=110)
    print(f"wrote {sys.argv[1]}")


if __name__ == "__main__":
    main()
