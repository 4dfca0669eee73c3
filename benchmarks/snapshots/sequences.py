"""Real training sequences: snapshots of weights and optimizer state, which codecs and stores are measured on.

    python benchmarks/snapshots/sequences.py [--folder FOLDER] [--quick] [--only NAME...]

Trains on one thread, the same bits each time on one machine and one version of PyTorch, and writes for each training
a folder of snapshots, `step-00120.safetensors`, with tensors "model/NAME" and "optimizer/NAME/STATE", and
`sequence.json`, which says what they are. Each training keeps three groups of snapshots: early (the weights move by a
few per cent from one to the next), middle, and late (the rate has decayed). The distance within a group is `unit`.

    cnn-sgd      convolutional network, 2.5 M weights, scikit-learn's digits with noise, SGD with momentum, the rate
                 cut twice by 10
    cnn-sgd-fast the same network, SGD at three times the rate, half as many steps: early, weights move by ten per cent
    cnn-adam     the same network, Adam, the rate falling to a hundredth
    gpt-fp32     transformer, 6.5 M weights, the text of Python's standard library, AdamW, the rate falling to a tenth
    gpt-bf16     the same, weights and both moments bfloat16, as `model.bfloat16()` and torch.optim.AdamW leave them
                 (no master copy of the weights); layers compute in float32, for many processors multiply bfloat16
                 ten times more slowly

About ten minutes on one core, 5 GB. The text is the one that the running Python has: another version of Python
trains on another text. Needs penstock[demo,safetensors].
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "sequences"
GROUPS = ("early", "middle", "late")
#: Where each group begins or ends: the early one begins here, the middle one too, the late one ends with the training.
EARLY, MIDDLE = 0.06, 0.5
SEED = 11
TEXT_BYTES = 8_000_000


def main(arguments: list[str] | None = None) -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="small models, few steps, pairs: shows that it runs"
    )
    parser.add_argument("--only", nargs="+", choices=list(TRAININGS), default=list(TRAININGS), metavar="NAME")
    options = parser.parse_args(arguments)
    for name in options.only:
        begin = time.perf_counter()
        sequence = record(name, options.folder / name, quick=options.quick)
        print(
            f"{name}: {sequence.parameters:,} weights, {len(sequence.snapshots)} snapshots, "
            f"{time.perf_counter() - begin:.0f} s"
        )
        for group in GROUPS:
            first, *_, last = sequence.group(group)
            moved = ", ".join(f"{snapshot.moved:.2%}" for snapshot in sequence.group(group)[1:4])
            print(
                f"  {group:7} steps {first.step} to {last.step}, loss {first.loss:.3g} to {last.loss:.3g}, "
                f"weights moved by {moved}, ... each"
            )


# -- What is written, and how it is read again -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One file.

    loss: smoothed over some ten steps. moved: |change of the weights since the snapshot before| / |weights|, in
        Euclidean norms; 0 for a group's first.
    """

    step: int
    group: str
    loss: float
    rate: float
    moved: float


@dataclass(frozen=True, slots=True)
class Sequence:
    """A training's snapshots, in order; those of a group are `unit` steps apart."""

    name: str
    description: str
    parameters: int
    unit: int
    made_by: str
    snapshots: tuple[Snapshot, ...]
    folder: Path

    def group(self, name: str) -> tuple[Snapshot, ...]:
        """Return the snapshots of "early", "middle" or "late"."""
        return tuple(snapshot for snapshot in self.snapshots if snapshot.group == name)

    def file(self, snapshot: Snapshot) -> Path:
        """Return where a snapshot is."""
        return self.folder / f"step-{snapshot.step:05}.safetensors"

    def load(self, snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """Return its tensors by name, in the order of the names."""
        from safetensors.torch import load_file

        return dict(sorted(load_file(self.file(snapshot)).items()))


def read_sequences(folder: Path, names: list[str] | None = None) -> list[Sequence]:
    """Return the sequences below a folder, in the order of this page's table. Raises: SystemExit if none is there."""
    found = []
    for name in names or TRAININGS:
        index = folder / name / "sequence.json"
        if index.exists():
            read = json.loads(index.read_text())
            read["snapshots"] = tuple(Snapshot(**snapshot) for snapshot in read["snapshots"])
            found.append(Sequence(**read, folder=index.parent))
    if not found:
        raise SystemExit(
            f"no sequence below {folder}: run python benchmarks/snapshots/sequences.py --folder {folder}"
        )
    return found


# -- Trainings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A model in training, a step at a time.

    unit: steps between the snapshots of a group. total: steps of the training.
    """

    description: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    loss_of: Callable[[], torch.Tensor]
    total: int
    unit: int

    def step(self) -> float:
        """Take one step; return the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the model and the optimizer, by name."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{name}/{key}"] = value
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def record(name: str, folder: Path, *, quick: bool) -> Sequence:
    """Train, and write the snapshots of the three groups and `sequence.json`."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    training = TRAININGS[name](quick)
    per_group = 2 if quick else 10
    span = (per_group - 1) * training.unit
    begins = (round(EARLY * training.total), round(MIDDLE * training.total), training.total - span)
    kept = {
        begin + index * training.unit: group
        for group, begin in zip(GROUPS, begins, strict=True)
        for index in range(per_group)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sequence.json").unlink(missing_ok=True)
    for stale in folder.glob("step-*.safetensors"):
        stale.unlink()
    snapshots: list[Snapshot] = []
    before: dict[str, torch.Tensor] = {}
    smooth = 0.0
    for step in range(1, training.total + 1):
        loss = training.step()
        smooth = loss if step == 1 else 0.9 * smooth + 0.1 * loss
        if step not in kept:
            continue
        state = training.state()
        group = kept[step]
        moved = moved_by(state, before) if snapshots and snapshots[-1].group == group else 0.0
        before = state
        save_file(state, folder / f"step-{step:05}.safetensors", metadata={"step": str(step)})
        rate = float(training.optimizer.param_groups[0]["lr"])
        snapshots.append(Snapshot(step, group, smooth, rate, moved))
    sequence = Sequence(
        name,
        training.description,
        sum(parameter.numel() for parameter in training.model.parameters()),
        training.unit,
        f"Python {platform.python_version()}, PyTorch {torch.__version__}",
        tuple(snapshots),
        folder,
    )
    written = {key: value for key, value in asdict(sequence).items() if key != "folder"}
    (folder / "sequence.json").write_text(json.dumps(written, indent=1) + "\n")
    return sequence


def moved_by(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """Return |change| / |weights|, Euclidean norms over all weights of at least two dimensions."""
    squares = [
        ((tensor.double() - before[name].double()).square().sum(), tensor.double().square().sum())
        for name, tensor in state.items()
        if name.startswith("model/") and tensor.is_floating_point() and tensor.ndim > 1
    ]
    changed, all_of_it = (float(sum(of)) for of in zip(*squares, strict=True))
    return math.sqrt(changed / all_of_it)


def digits(width: int) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Return a convolutional network and what gives the loss of the next batch of handwritten digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(labels)
    layers: list[torch.nn.Module] = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    model = torch.nn.Sequential(
        *layers,
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * width * 16, 8 * width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(8 * width, 10),
    )

    def loss_of() -> torch.Tensor:
        # Without the noise the network learns all digits by heart, and half of its gradients are exactly zero.
        batch = torch.randint(len(classes), (64,))
        noisy = pixels[batch] + 0.3 * torch.randn(64, 1, 8, 8)
        return torch.nn.functional.cross_entropy(model(noisy), classes[batch], label_smoothing=0.1)

    return model, loss_of


def cnn_sgd(rate: float, steps: int) -> Callable[[bool], Training]:
    """Return what makes the convolutional network under SGD, at a rate to begin with, for so many steps."""

    def make(quick: bool) -> Training:
        total, unit = (16, 2) if quick else (steps, 10)
        model, loss_of = digits(4 if quick else 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [2 * total // 5, 4 * total // 5], gamma=0.1
        )
        description = (
            f"convolutional network on scikit-learn's digits, SGD with momentum, rate {rate:g}, float32"
        )
        return Training(description, model, optimizer, schedule, loss_of, total, unit)

    return make


def cnn_adam(quick: bool) -> Training:
    """Return the convolutional network under Adam."""
    total, unit = (16, 2) if quick else (800, 10)
    model, loss_of = digits(4 if quick else 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=3e-6)
    description = "convolutional network on scikit-learn's digits, Adam, float32"
    return Training(description, model, optimizer, schedule, loss_of, total, unit)


class Block(torch.nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.joined = torch.nn.Linear(width, width)
        self.perceptron_norm = torch.nn.LayerNorm(width)
        self.perceptron = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return float[batch, length, width], as it takes."""
        batch, length, width = states.shape
        asked = self.attention(self.attention_norm(states))
        query, key, value = asked.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        after: torch.Tensor = states + self.perceptron(self.perceptron_norm(states))
        return after


class Transformer(torch.nn.Module):
    """A decoder over bytes."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.symbol = torch.nn.Embedding(256, width)
        self.place = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte at each place."""
        states = self.symbol(text) + self.place(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.head(self.norm(self.blocks(states)))
        return scores


def gpt(dtype: torch.dtype) -> Callable[[bool], Training]:
    """Return what makes the transformer in a type of number."""

    def make(quick: bool) -> Training:
        width, layers, length = (32, 2, 32) if quick else (256, 8, 128)
        total, unit = (16, 2) if quick else (400, 8)
        text = torch.frombuffer(bytearray(library_text()), dtype=torch.uint8)
        model = Transformer(width, layers, length).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
        warm = max(total // 20, 1)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warm, eta_min=1e-4),
            ],
            milestones=[warm],
        )

        def loss_of() -> torch.Tensor:
            first = torch.randint(len(text) - length - 1, (4, 1))
            window = text[first + torch.arange(length + 1)].long()
            weights = {name: weight.float() for name, weight in model.named_parameters()}
            scores = torch.func.functional_call(model, weights, window[:, :-1])
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())

        kind = str(dtype).removeprefix("torch.")
        description = f"transformer on the text of Python's standard library, AdamW, all {kind}"
        return Training(description, model, optimizer, schedule, loss_of, total, unit)

    return make


def library_text() -> bytes:
    """Return the first bytes of the standard library's modules, one after the other by name."""
    parts: list[bytes] = []
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= TEXT_BYTES:
            break
    return b"".join(parts)[:TEXT_BYTES]


TRAININGS: dict[str, Callable[[bool], Training]] = {
    "cnn-sgd": cnn_sgd(0.01, 800),
    "cnn-sgd-fast": cnn_sgd(0.03, 400),
    "cnn-adam": cnn_adam,
    "gpt-fp32": gpt(torch.float32),
    "gpt-bf16": gpt(torch.bfloat16),
}

if __name__ == "__main__":
    main()
