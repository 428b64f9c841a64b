"""Tables of `hashtrain` runs, from their metrics."""

from collections.abc import Callable

from evals.grid import HEADS, Grid, percent
from hashtrain.reporting.worst import FIGURES, Metrics, dense_of, figures


def training_grid(metrics: Metrics, heads: str = "kv_head") -> Grid:
    """Format the final evaluation of a `hashtrain` run, from its metrics.json."""
    found = {name: (of[heads], dense_of(metrics, name)) for name, of in metrics["hashers"].items()}
    whole = all("lost_by_head" in layer for of, _ in found.values() for layer in of["layers"])
    title = (
        f"{FIGURES + ';' if whole else 'IoU / attention mass'} {HEADS[heads]}, {metrics['bits']} bits, "
        f"top {percent(metrics['fraction'])}, "
        f"{metrics['held_out']} held-out contexts of {metrics['context']} tokens, {metrics['steps']} steps a layer"
    )
    return _by_layer(title, metrics["layers"], found, figures)


def _by_layer(
    title: str,
    layers: int,
    found: dict[str, tuple[Metrics, list[int]]],
    cell: Callable[[Metrics, list[int], int | None], str],
) -> Grid:
    """Format the cells of all hashers by layer, and their means.

    Args:
        found: each hasher's results and dense layers; cell: called with these and a layer, or None for the mean.
    """

    def line(label: str, layer: int | None) -> list[str]:
        return [label, *(cell(*of, layer) for of in found.values())]

    body = [line(str(layer), layer) for layer in range(layers)]
    return Grid(title, ["layer", *found], [body, [line("mean", None)]])


def hashers_grid(metrics: Metrics) -> Grid:
    """Format the means of every hasher of a `hashtrain` run, one line each, the best IoU first."""
    found = metrics["hashers"]

    def line(name: str) -> list[str]:
        pairs = [found[name][heads]["mean"] for heads in HEADS]
        rate = metrics["learning_rates"].get(name)
        return [name, *(f"{p['iou']:.3f} / {p['mass']:.3f}" for p in pairs), "" if rate is None else f"{rate:g}"]

    names = sorted(found, key=lambda name: -found[name]["kv_head"]["mean"]["iou"])
    title = (
        f"IoU / attention mass, mean over the layers that run sparse, top {percent(metrics['fraction'])}, "
        f"{metrics['bits']} bits unless named, {metrics['held_out']} held-out contexts of {metrics['context']} tokens, "
        f"{metrics['steps']} steps a layer"
    )
    return Grid(title, ["hasher", *HEADS.values(), "learning rate"], [[line(name) for name in names]])


def remainder_grid(metrics: Metrics) -> Grid:
    """Format the softmax share that each hasher's selections leave out, and the error of its estimate, per layer."""

    def pair(found: Metrics, dense: list[int], layer: int | None) -> str:
        shown = found["mean"] if layer is None else found["layers"][layer]
        return f"{percent(shown['share'])} / {percent(shown['error'])}" + " (dense)" * (layer in dense)

    title = (
        f"Share of the softmax that the top {percent(metrics['fraction'])} leave out / root mean square error of its "
        f"estimate, {metrics['held_out']} held-out contexts of {metrics['context']} tokens"
    )
    found = {name: (of["remainder"], dense_of(metrics, name)) for name, of in metrics["hashers"].items()}
    return _by_layer(title, metrics["layers"], found, pair)
