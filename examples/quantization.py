"""The errors of quantized all-reduces: the tables and the plot of docs/internals/quantization.md.

    python examples/quantization.py [PLOT.svg]

Peers are threads of this process, each with its own communicator, which exchange the same data as
over a network. It takes some seconds. The plot needs matplotlib.
"""

import argparse
import importlib.util
import threading

import numpy as np

import pccl

COUNT = 1 << 18
PEERS = (2, 4, 8)
Algorithm = pccl.QuantizationAlgorithm
WAYS = {
    "BLOCKWISE_INT8": pccl.QuantizationOptions(algorithm=Algorithm.BLOCKWISE_INT8),
    "BLOCKWISE_INT4": pccl.QuantizationOptions(algorithm=Algorithm.BLOCKWISE_INT4),
    "MIN_MAX, UINT8": pccl.QuantizationOptions(pccl.DataType.UINT8, Algorithm.MIN_MAX),
    "MIN_MAX, UINT16": pccl.QuantizationOptions(pccl.DataType.UINT16, Algorithm.MIN_MAX),
    "ZERO_POINT_SCALE, UINT8": pccl.QuantizationOptions(
        pccl.DataType.UINT8, Algorithm.ZERO_POINT_SCALE
    ),
    "ZERO_POINT_SCALE, UINT16": pccl.QuantizationOptions(
        pccl.DataType.UINT16, Algorithm.ZERO_POINT_SCALE
    ),
}


def normal(rng: np.random.Generator) -> np.ndarray:
    """Normally distributed numbers, like the gradients of a layer."""
    return rng.standard_normal(COUNT).astype(np.float32)


def outliers(rng: np.random.Generator) -> np.ndarray:
    """The same numbers, but one in a thousand is a hundred times as large."""
    return normal(rng) * np.where(rng.random(COUNT) < 0.001, np.float32(100), np.float32(1))


def positive(rng: np.random.Generator) -> np.ndarray:
    """Numbers between 10 and 11: far from 0, and near each other."""
    return rng.uniform(10, 11, COUNT).astype(np.float32)


EXACT = {"sum": np.sum, "max": np.max}
INPUTS = {"normal": normal, "with outliers": outliers, "10 to 11": positive}


def reduce(address: str, arrays: list[np.ndarray], op: str) -> dict[str, tuple[np.ndarray, float]]:
    """The result of every quantization, from one array per peer, and its bytes per element."""
    found: dict[str, tuple[np.ndarray, float]] = {}

    def work(number: int) -> None:
        with pccl.Communicator(address) as comm:
            while comm.world_size < len(arrays):
                if comm.are_peers_pending():
                    comm.update_topology()
            for name, options in WAYS.items():
                out = np.empty_like(arrays[number])
                info = comm.all_reduce(arrays[number], out, op=op, quantization_options=options)
                if number == 0:
                    sent = COUNT * 2 * (info.world_size - 1) / info.world_size
                    found[name] = out, info.tx_bytes / sent

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def relative_error(result: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square of the error, over that of the exact result."""
    return float(np.sqrt(np.mean((result - exact) ** 2) / np.mean(exact**2)))


def measure(op: str) -> tuple[dict[tuple[str, str, int], float], dict[str, float]]:
    """The error by (way, input, peers), and bytes for an element by way."""
    errors: dict[tuple[str, str, int], float] = {}
    sent: dict[str, float] = {}
    for kind, make in INPUTS.items():
        for peers in PEERS:
            rng = np.random.default_rng(peers)
            arrays = [make(rng) for _ in range(peers)]
            exact = EXACT[op]([array.astype(np.float64) for array in arrays], axis=0)
            with pccl.MasterNode("127.0.0.1:0") as master:
                for name, (result, nbytes) in reduce(master.address, arrays, op).items():
                    errors[name, kind, peers] = relative_error(result, exact)
                    sent[name] = nbytes
    return errors, sent


def print_table(op: str, errors: dict[tuple[str, str, int], float], sent: dict[str, float]) -> None:
    """The table in Markdown: errors in percent."""
    columns = [f"{kind}, {peers} peers" for kind in INPUTS for peers in PEERS]
    print("|", " | ".join([op, "bytes", *columns]), "|")
    print("|", " | ".join("---" for _ in range(2 + len(columns))), "|")
    for name in WAYS:
        cells = [f"{100 * errors[name, kind, peers]:.2g}" for kind in INPUTS for peers in PEERS]
        print("|", " | ".join([name, f"{sent[name]:.3f}", *cells]), "|")


def plot(path: str, errors: dict[tuple[str, str, int], float]) -> None:
    """One panel for each kind of input."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    figure, panels = plt.subplots(1, len(INPUTS), figsize=(11, 3.8), sharey=True)
    for panel, kind in zip(panels, INPUTS, strict=True):
        for name in WAYS:
            values = [100 * errors[name, kind, peers] for peers in PEERS]
            panel.plot(PEERS, values, marker="o", label=name)
        panel.set(title=kind, xlabel="peers", xscale="log", yscale="log")
        panel.set_xticks(PEERS, [str(peers) for peers in PEERS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("error of the sum, % (root mean square)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Prints the tables, and plots the sums if asked."""
    parser = argparse.ArgumentParser(description="Errors of quantized all-reduces.")
    parser.add_argument("plot", nargs="?", metavar="PLOT.svg", help="where to plot those of sums")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib: pip install matplotlib")
    for op in EXACT:
        errors, sent = measure(op)
        print_table(op, errors, sent)
        print()
        if op == "sum" and args.plot:
            plot(args.plot, errors)


if __name__ == "__main__":
    main()
