"""Networks of the mini-applications, in PyTorch: AlexNet, ResNet-50, and a small transformer over patches.

All take images of 224 x 224 with three channels, and are trained with Adam on one-hot labels. Source of the first:
Chien et al. 2018, section III.B: five convolutions, three max-pools, three dense layers, ReLU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.bench.checks import MODELS
from penstock.bench.loaders import SIDE

_LEARNING_RATE = 1e-4
_WIDTH, _PATCH, _HEADS, _LAYERS = 192, 16, 3, 4


def alexnet(classes: int) -> nn.Module:
    """Return AlexNet with 61 million weights for 1,000 classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        ),
    )


class _Bottleneck(nn.Module):
    """A residual block of three convolutions, the middle one narrow. Source: He et al. 2015, Figure 5."""

    def __init__(self, inside: int, narrow: int, stride: int) -> None:
        super().__init__()
        outside = 4 * narrow
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()),
            *(nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()),
            *(nn.Conv2d(narrow, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        is_same = inside == outside and stride == 1
        self.skip: nn.Module = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.skip(images))


def resnet50(classes: int) -> nn.Module:
    """Return a ResNet of 50 layers. Source: He et al. 2015, Table 1."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for narrow, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(_Bottleneck(inside, narrow, stride if number == 0 else 1))
            inside = 4 * narrow
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class _Transformer(nn.Module):
    """Patches of 16 x 16 as tokens, four layers of width 192. Source: Dosovitskiy et al. 2020, section 3.1."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.places = nn.Parameter(torch.zeros(1, (SIDE // _PATCH) ** 2, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        head: Tensor = self.head(self.layers(tokens).mean(1))
        return head


_MAKERS: tuple[Callable[[int], nn.Module], ...] = (alexnet, resnet50, _Transformer)
_MODELS = dict(zip(MODELS, _MAKERS, strict=True))


class TrainingStep:
    """A step of a model's training, on a GPU where there is one; begun anew, it gives the same losses bit by bit.

    name: of `penstock.bench.checks.MODELS`.
    """

    def __init__(self, name: str, classes: int) -> None:
        self._name, self._classes = name, max(2, classes)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.begin()

    def begin(self) -> None:
        """Forget everything that was learned."""
        torch.manual_seed(0)
        self._model = _MODELS[self._name](self._classes).to(self._device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=_LEARNING_RATE)

    def __call__(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Train on a batch and return its loss."""
        inputs, numbers = (torch.from_numpy(array).to(self._device) for array in (images, labels))
        wanted = nn.functional.one_hot(numbers, self._classes).float()
        self._optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self._model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    @property
    def state_bytes(self) -> int:
        """What the weights and Adam's two moments of each take, about."""
        return 3 * sum(each.nbytes for each in self._model.parameters())

    def state(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
