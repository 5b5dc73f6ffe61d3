"""The table of docs/gpu.md, from the record of benchmarks/gpu.py."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu.json"
HANDLERS = ("plain sampling", "local reparameterisation", "flipout")
OURS, COMPILED = ([f"{name}, {how}" for name in HANDLERS] for how in ("ours", "ours, compiled"))
BEYOND = "seconds beyond the steps"
KRON = [f"Kronecker, {how}, without eigenvectors, in plain epochs" for how in ("Fisher", "exact")]
# Title, unit, case, what of a row (or None for findings of the case), and the names of both.
ROWS = [
    ("step of the MLP, compiled", "plain steps", "mlp_step", "to_plain", COMPILED),
    ("the same, not compiled", "plain steps", "mlp_step", "to_plain", OURS),
    ("step of ResNet-18, compiled", "steps by hand", "resnet18_step", "to_limit", COMPILED),
    ("the same, not compiled", "steps by hand", "resnet18_step", "to_limit", OURS),
    ("second compiled fit, beyond its steps", "seconds", "second_fit", None, [BEYOND]),
    ("32 draws of the MLP", "32 forwards", "mlp_predict", "to_plain", ["predict, ours"]),
    ("32 draws of ResNet-18", "32 forwards", "resnet18_predict", "to_plain", ["predict, ours"]),
    ("64 draws of ResNet-18's last layer", "forwards", "last_layer", "to_plain", ["predict, ours"]),
    ("curvature, Kronecker factors: Fisher, exact", "epochs", "laplace_curvature", None, KRON),
    (
        *("curvature, diagonal: Fisher, exact", "epochs", "laplace_curvature", "to_plain"),
        ["diagonal, Fisher", "diagonal, exact"],
    ),
    (
        *("eigenvectors of the factors", "seconds", "laplace_curvature", "seconds"),
        ["eigenvectors of the Kronecker factors"],
    ),
    (
        *("linearised, all layers, Kronecker", "forwards", "laplace_predictions", "to_plain"),
        ["all layers, Kronecker, glm"],
    ),
    (
        *("leapfrog of NUTS: 4, 256 chains", "NumPyro's", "samplers", "to_plain"),
        ["NUTS, 4 chains, ours", "NUTS, 256 chains, ours"],
    ),
]


def table():
    """Return a Markdown table of medians, and the command and machine it came from."""
    results = json.loads(RESULTS.read_text())
    cases = {case["name"]: case for case in results["cases"]}
    lines = ["| | | in units of |", "|---|--:|---|"]
    for title, unit, name, kind, wanted in ROWS:
        if name not in cases:
            lines.append(f"| {title} | not measured | {unit} |")
            continue
        case = cases[name]
        found = {row["name"]: row for row in case["contestants"]}
        cells = [case["findings"][one] if kind is None else found[one][kind] for one in wanted]
        numbers = ", ".join(f"{cell['median']:.2g}" for cell in cells)
        lines.append(f"| {title} | {numbers} | {unit} |")
    about = results["environment"]
    source = (
        f"Steps are by plain sampling, local reparameterisation and flipout. `{about['command']}`, "
        f"{about['machine']['gpu']}, torch {about['versions']['torch']}, {about['date']}."
    )
    return "\n".join([*lines, "", source]) + "\n"
