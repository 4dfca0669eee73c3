"""The loader for users of PyTorch: batches as tensors."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock import loader
from penstock.errors import ConfigError
from penstock.flow.staging import DeviceEvent
from penstock.loader.config import LoaderArguments, LoaderConfig
from penstock.loader.dataset import MapDataset, numpy_leaf
from penstock.loader.front_end import FrontEnd, with_images
from penstock.loader.unequal import Ragged
from penstock.ranks import Ranks
from penstock.report import print_report
from penstock.store import Source
from penstock.torch.batch_steps import BatchesAt, BatchSteps
from penstock.torch.device import CudaDevice, PinnedSlots, changed, device_of, pinned
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TorchArguments(LoaderArguments, total=False):
    """The arguments of a loader, as users of PyTorch may give them."""

    dtype: str | torch.dtype  # type: ignore[misc]


@final
class Loader(loader.Loader):
    """Batches as tensors, the large ones over the staging buffer without a copy.

    Takes a `penstock.LoaderConfig` or its arguments; dtype may be a torch.dtype.

    A folder gives tuples of images, [batch, channels, height, width] (or channels last) and labels, int64[batch].
    A source whose labels have names gives dicts: images, and a tensor for each name.
    A map-style data set gives what PyTorch's own loader makes of it.

    A slot is filled again when no tensor refers to it any more and, where CUDA is in use, the copies that were
    enqueued on the current stream when the last one went have ended: `.to(device, non_blocking=True)` is safe.
    With device= the tensors are on a CUDA device, and as any other there: they may be kept, and a stream that was not
    current when a batch was handed out must be named to them (`record_stream`).
    Tensors of less than a 64th of a sample, as labels are next to images, are copies: to keep them keeps no slot.
    """

    def __init__(
        self,
        source: LoaderConfig | str | os.PathLike[str] | Source | MapDataset,
        *,
        mesh: DeviceMesh | None = None,
        ranks: Callable[[], Ranks] | None = None,
        state: Mapping[str, Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] | None = print_report,
        device: str | torch.device | None = None,
        device_memory: str | int | None = None,
        normalize_on_device: bool | None = None,
        pin_memory: bool = False,
        **arguments: Unpack[TorchArguments],
    ) -> None:
        """Open the source and make ready to prefetch, as `penstock.Loader`.

        device: a CUDA device, to which batches are copied before they are asked for, with slots that it reads by
            itself; None or "cpu": batches stay in their slots.
        device_memory: bound on the batches that are there at once, those that the training is at included; what it
            keeps is its own. Four batches, within an eighth of what is free, unless given.
        normalize_on_device: whether images cross to the device as bytes, and become numbers there, bit for bit those of
            the CPU: a quarter of the bytes of float32, for slots and bus alike. None: wherever nothing but ToTensor
            and Normalize makes numbers of pixels.
        pin_memory: hand out page-locked tensors, as DataLoader does, for copies of your own.
        Raises: as `penstock.Loader`; ConfigError for a device that there is not, or whose memory cannot be bounded so.
        """
        if isinstance(dtype := arguments.get("dtype"), torch.dtype):
            arguments["dtype"] = _name_of(dtype)
        super().__init__(
            source,
            front_end=_front_end(device, device_memory, normalize_on_device, pin_memory, report),
            mesh=mesh,
            ranks=ranks,
            state=state,
            trace=trace,
            report=report,
            **cast(LoaderArguments, arguments),
        )

    # What accelerate asks of a DataLoader, to make another that skips batches of it.

    @property
    def batch_sampler(self) -> Any:
        """By accelerate's `skip_first_batches`, whose DataLoader asks `dataset` for what this yields."""
        return BatchSteps(self)

    @property
    def dataset(self) -> Any:
        """Its length is the samples of an epoch, as of a data set; what it gives are batches."""
        return BatchesAt(self)

    sampler = prefetch_factor = None

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch, which is one already."""
        return batch

    @property
    def generator(self) -> torch.Generator:
        """What a DataLoader draws a seed from in place of the training's own generator."""
        return torch.Generator()


def _present(batch: Any, dtype: str | None) -> Any:
    if dtype == "bfloat16":
        batch = with_images(batch, lambda images: images.view(_marked(torch.bfloat16)))
    return _tensors(batch)


def _as_array(leaf: Any) -> NDArray[Any] | None:
    return _array(leaf) if isinstance(leaf, torch.Tensor) else numpy_leaf(leaf)


_TO_LIST = torch.Tensor.tolist


def _copy_leaves(leaves: Sequence[Any], place: NDArray[Any]) -> bool:
    if place.dtype.names is not None or type(leaves[0]) is not torch.Tensor:
        return False
    out = torch.from_numpy(place)
    if {leaf.dtype for leaf in leaves} != {out.dtype} or leaves[0].shape != out.shape[1:]:
        return False
    # Leaves of several shapes, floats on a device or with a gradient: one by one, each may say what is wrong.
    try:
        # `stack` would make a tensor with a dimension of each integer first. A list is no integer, but it is a bool.
        if out.dim() == 1 and place.dtype.kind in "iu":
            place[:] = np.fromiter(map(_TO_LIST, leaves), place.dtype, len(leaves))
        else:
            torch.stack(tuple(leaves), out=out)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _device_event() -> Callable[[], DeviceEvent | None] | None:
    return cuda_event if torch.backends.cuda.is_built() else None  # type: ignore[no-untyped-call]


_intra_op = threading.Lock()
#: Of each thread that is in `_as_workers`, how many threads its operations have otherwise.
_usual: dict[int, int] = {}


def _compute_alone() -> None:
    """Have the calling thread run PyTorch's operations by itself, as a DataLoader's workers do.

    Threads that each have helpers of their own, which spin while they wait for each other, are several times slower
    than threads without: processors are shared by samples, not inside them.

    PyTorch makes what a thread sets for itself the default of all threads that have not asked yet; another thread sets
    it back to what it is now, which the training may have changed since the loader was made. At the limit of threads
    there is no other thread, and nothing is set.
    """
    with _intra_op:
        found = torch.get_num_threads()  # the first operation would ask, too, and set this thread back
        usual = next(iter(_usual.values()), found)
        is_set = threading.Event()

        def restore() -> None:
            is_set.wait()
            torch.set_num_threads(usual)

        restoring = threading.Thread(target=restore, daemon=True)
        try:
            restoring.start()
        except RuntimeError:
            return
        torch.set_num_threads(1)
        is_set.set()
        restoring.join()


def _as_workers() -> AbstractContextManager[None]:
    """Have the calling thread run PyTorch's operations by itself for a while: a sum by several has other last bits.

    A thread that asks for its number for the first time meanwhile, and is none of a loader's, has one from then on.
    """
    usual = torch.get_num_threads()
    return _ALONE if usual == 1 else _alone(usual)


#: Where the thread runs them by itself anyway.
_ALONE = nullcontext()


@contextmanager
def _alone(usual: int) -> Iterator[None]:
    me = threading.get_ident()
    try:
        with _intra_op:
            _usual[me] = usual
            torch.set_num_threads(1)
        yield
    finally:
        with _intra_op:
            torch.set_num_threads(usual)
            _usual.pop(me, None)


def _is_plain_thread() -> bool:
    """Whether a data set computes in the calling thread as in one for which nothing is set."""
    return not (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch._C._len_torch_function_stack()  # as under `with torch.device(...)`
    )


def cuda_event() -> DeviceEvent | None:
    """Return an event for the CUDA stream that is current when it is recorded; None while CUDA is not in use.

    Not a torch.cuda.Event, whose methods are written in Python.
    """
    return torch.Event("cuda", enable_timing=False) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


# NumPy has no bfloat16 and no 8-bit floats. An array of them holds their bits, in a structured type of one field whose
# name says what they are: it cannot be taken for numbers, and it survives every view.
_BITS = {1: (torch.uint8, "u1"), 2: (torch.int16, "i2")}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _marked(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype([(_name_of(dtype), _BITS[dtype.itemsize][1])])


def _array(tensor: torch.Tensor) -> NDArray[Any] | None:
    """Return a tensor as an array, over the same memory where it can be; None if it has no elements of its own."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.numpy()
    except (
        TypeError,
        RuntimeError,
    ):  # on a device, with a gradient, conjugated or of a type that NumPy does not know
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:  # a type that NumPy does not know
        if tensor.dtype.itemsize not in _BITS:
            return None
        bits = tensor.contiguous().view(_BITS[tensor.dtype.itemsize][0])
        return bits.numpy().view(_marked(tensor.dtype))


def _tensors(batch: Any) -> Any:
    """Turn every array of a structure into a tensor over the same memory."""
    return changed(batch, _tensor)


def _tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf)
    if leaf.dtype.names is None:
        return leaf
    (name,) = leaf.dtype.names
    return torch.from_numpy(leaf[name]).view(getattr(torch, name))


def _reduced(tensor: torch.Tensor) -> Any:
    """Pickle a tensor by its array, whose memory a message shares; others as PyTorch does."""
    is_plain = tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.__dict__
    array = _array(tensor) if is_plain else None
    if array is None:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return _tensors, (np.ascontiguousarray(array).reshape(array.shape),)


def to_nested(ragged: Ragged) -> torch.Tensor:
    """Return a batch of a ragged field as a nested tensor of PyTorch's jagged layout, over the same memory."""
    lengths = ragged.lengths.tolist() or [0]
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        ragged.values, ragged.offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
    return made


#: Batches as tensors.
TORCH = FrontEnd(
    _present,
    _as_array,
    _copy_leaves,
    _compute_alone,
    _device_event,
    {torch.Tensor: _reduced},
    is_plain_thread=_is_plain_thread,
    as_workers=_as_workers,
)


def _front_end(
    device: str | torch.device | None,
    device_memory: str | int | None,
    normalizes: bool | None,
    pins: bool,
    report: Callable[[str], None] | None,
) -> FrontEnd:
    """Return what a loader hands its batches out by. Raises: ConfigError as the constructor."""
    found = device_of(device)
    if found is not None:
        try:
            limit_bytes = None if device_memory is None else parse_bytes(device_memory)
        except ConfigError as error:
            raise ConfigError(f"device_memory: {error}") from error
        on_device = CudaDevice(found, limit_bytes, normalizes)
        return replace(TORCH, device=on_device, pinning=PinnedSlots(found, report))
    for name, value in (("device_memory", device_memory), ("normalize_on_device", normalizes)):
        if value:
            raise ConfigError(f"{name} is {value!r}, and no device is given: give one, such as device='cuda'")
    if not pins:
        return TORCH
    if not torch.cuda.is_available():
        warnings.warn(
            "pin_memory is True, and there is no CUDA device: memory is not page-locked", stacklevel=3
        )
        return TORCH
    pinning = PinnedSlots(torch.device("cuda", torch.cuda.current_device()), report)
    return replace(TORCH, pinning=pinning, present=_present_pinned, present_made=pinned)


def _present_pinned(batch: Any, dtype: str | None) -> Any:
    return pinned(_present(batch, dtype))
