"""What will be read, by whom, when: orders, splits over ranks, and the access plan made of both."""

from penstock.plan.access import AccessPlan
from penstock.plan.batches import Batches, Flat
from penstock.plan.budget import Padding, TokenBudget
from penstock.plan.explicit import Explicit
from penstock.plan.local import split_locally
from penstock.plan.mixing import Mixture
from penstock.plan.orders import (
    BundleShuffle,
    CutOrder,
    DescribedOrder,
    EvenOrder,
    FullShuffle,
    Order,
    RepeatingOrder,
    Sequential,
)
from penstock.plan.packing import Packing, Row
from penstock.plan.scattered import Scattered
from penstock.plan.splits import Assigned, Balanced, Replicated, Shares, Split, Strided, Uniform
from penstock.plan.torch_order import TorchDistributed, TorchShuffle, TwisterState

__all__ = [
    "AccessPlan",
    "Assigned",
    "Balanced",
    "Batches",
    "BundleShuffle",
    "CutOrder",
    "DescribedOrder",
    "EvenOrder",
    "Explicit",
    "Flat",
    "FullShuffle",
    "Mixture",
    "Order",
    "Packing",
    "Padding",
    "RepeatingOrder",
    "Replicated",
    "Row",
    "Scattered",
    "Sequential",
    "Shares",
    "Split",
    "Strided",
    "TokenBudget",
    "TorchDistributed",
    "TorchShuffle",
    "TwisterState",
    "Uniform",
    "split_locally",
]
