"""What moves with a picture: masks, boxes and key points get its crops, resizes, flips, borders and rotations.

The geometry is drawn once for each sample and is that of the picture (`geometry`). A mask is resampled to the nearest
pixel, so that its values stay what they are; colours and noise leave it alone.
"""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.transforms.augment import (
    AUGMENTS,
    Border,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Pad,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    pixels_from,
    rotation_matrix,
)
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.foreign import Called, as_picture, is_pil
from penstock.loader.transforms.geometry import (
    Box,
    Geometry,
    StepNumbers,
    center_border,
    cropped,
    is_resampled,
    needs_padding,
    resized_to,
    size_after,
    whole,
    without_resize,
)
from penstock.loader.transforms.pipeline import Pipeline, Transform, compile_pipeline
from penstock.loader.transforms.stages import Scratch, name_of
from penstock.loader.transforms.steps import Normalize, ToTensor
from penstock.plan.random import generator_for

#: Steps that leave every pixel where it is.
_IN_PLACE = (*(ColorJitter, GaussianBlur, Grayscale, RandomErasing, RandomGrayscale), *(Normalize, ToTensor))
#: Of a PNG file: where its header says how many bits a pixel has, and of which kind it is.
_PNG, _PNG_BITS, _PNG_KIND, _PNG_GREY = b"\x89PNG\r\n\x1a\n", 24, 25, 0


#: What parts of a sample are called where they have no names of their own.
_PARTS = ("image", "mask", "boxes", "labels", "keypoints")


class Part(Protocol):
    """What moves with a picture; `geometry` is what is still to be done to it."""

    geometry: Geometry

    def settle(self) -> None:
        """Do what is still to be done."""

    def pad(self, border: Border) -> None:
        """Add a border. It is settled."""

    def turn(self, degrees: float) -> None:
        """Turn it about its centre, counter-clockwise. It is settled."""


class Plane:
    """A mask on its way, or several that lie behind each other.

    array: [height, width] or [height, width, masks] of integers. fill: what stands where the picture was not.
    """

    def __init__(self, array: NDArray[Any], fill: int = 0) -> None:
        self._fill = fill
        self.replace(array)

    def replace(self, array: NDArray[Any]) -> None:
        """Go on with another mask, to which nothing is to be done yet."""
        self.array = array
        self.geometry = whole(*array.shape[:2])

    def settle(self) -> None:
        rows, columns = self._places()
        self.replace(self.array.take(rows, 0).take(columns, 1))

    def write(self, out: NDArray[Any]) -> None:
        """Do what is still to be done, into `out`."""
        rows, columns = self._places()
        out[...] = self.array.take(rows, 0).take(columns, 1)

    def pad(self, border: Border) -> None:
        left, above, right, below = border.sides
        widths = ((above, below), (left, right), (0, 0))[: self.array.ndim]
        if border.mode == "constant":
            self.replace(np.pad(self.array, widths, constant_values=self._fill))
        else:
            self.replace(np.pad(self.array, widths, border.mode))

    def turn(self, degrees: float) -> None:
        height, width = self.geometry.size
        matrix = rotation_matrix(height, width, degrees)
        # OpenCV turns bytes and floats; those hold every class exactly.
        known = self.array if self.array.dtype == np.uint8 else self.array.astype(np.float64)
        # And no more than four channels at once.
        planes = [known] if known.ndim == 2 else np.moveaxis(known, 2, 0)
        turned = [pixels_from(np.ascontiguousarray(each), matrix, self._fill) for each in planes]
        turned_array = turned[0] if known.ndim == 2 else np.stack(turned, axis=2)
        self.array = turned_array.astype(self.array.dtype)

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        of = self.geometry
        box, resized, window = of.box, of.resized, of.window
        return (
            _nearest(box.top, box.height, resized[0], window.top, window.height, of.is_upside_down),
            _nearest(box.left, box.width, resized[1], window.left, window.width, of.is_mirrored),
        )


def _nearest(
    start: int, extent: int, resized: int, window: int, length: int, is_flipped: bool
) -> NDArray[np.int64]:
    """Return the pixel of one axis that lies nearest to the centre of each pixel of the result, as Pillow's NEAREST."""
    places = start + (2 * (window + np.arange(length)) + 1) * extent // (2 * resized)
    return places[::-1] if is_flipped else places


class Marks:
    """Points on their way, in pixels from the upper left corner of the picture: float64[n, 2], across and down."""

    def __init__(self, points: NDArray[np.float64], height: int, width: int) -> None:
        self.points = points
        self.geometry = whole(height, width)

    def settle(self) -> None:
        of = self.geometry
        box, (rows, columns), window = of.box, of.resized, of.window
        across = (self.points[:, 0] - box.left) * (columns / box.width) - window.left
        down = (self.points[:, 1] - box.top) * (rows / box.height) - window.top
        across = window.width - across if of.is_mirrored else across
        down = window.height - down if of.is_upside_down else down
        self.points = np.stack([across, down], axis=1)
        self.geometry = whole(window.height, window.width)

    def pad(self, border: Border) -> None:
        left, above, right, below = border.sides
        height, width = self.geometry.size
        self.points = self.points + np.array([left, above])
        self.geometry = whole(height + above + below, width + left + right)

    def turn(self, degrees: float) -> None:
        # The matrix says where a pixel was, by the indices of centres.
        matrix = np.array(rotation_matrix(*self.geometry.size, degrees))
        turned = np.linalg.solve(matrix[:, :2], (self.points - 0.5 - matrix[:, 2]).T)
        self.points = turned.T + 0.5


Move = Callable[[Part, Draws, int], None]


class Moves:
    """The steps of a pipeline that move pixels, for what goes with its pictures.

    called: the first that is called with picture and mask, so that nothing but a mask goes along; None without any.
    Raises: ConfigError for a step that may move pixels by rules of its own.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        if not pipeline.is_visual:
            raise ConfigError(
                "transforms take no pictures, which masks and boxes go with: put a step of theirs in"
            )
        self.called: Called | None = None
        #: Of each step.
        self._moves: list[Move] = []
        for step, key, numbers in pipeline.steps_in_numbers():
            if numbers is not None:
                self._moves.append(_picture_move(numbers))
            elif isinstance(step, Pad):
                self._moves.append(_border_move(step))
            elif isinstance(step, RandomCrop):
                self._moves.append(_crop_move(step, key))
            elif isinstance(step, RandomRotation):
                self._moves.append(_turn_move(step, key))
            elif _stays_in_place(step):
                self._moves.append(_stay)
            elif isinstance(step, Called) and step.takes_mask:
                self.called = self.called or step
                self._moves.append(_stay)
            else:
                raise ConfigError(
                    f"{step} among the transforms may move pixels, and what goes with a picture would not move with "
                    "them: leave it out, or take crops, resizes, flips, Pad and RandomRotation of "
                    "penstock.loader.transforms, or albumentations' transforms"
                )

    def move(self, part: Part, draws: Draws, index: int, steps: slice = slice(None)) -> None:
        """Do steps but the last settling. draws, index: as of `Pipeline.run`, for the same sample."""
        for move in self._moves[steps]:
            move(part, draws, index)


class Along:
    """A `Beside`: a mask, and how many steps are done to it."""

    def __init__(self, moves: Moves, plane: Plane) -> None:
        self._moves, self._plane, self._done = moves, plane, 0

    def before(self, place: int, draws: Draws, index: int) -> NDArray[Any]:
        """See `Beside`."""
        self._moves.move(self._plane, draws, index, slice(self._done, place))
        self._done = place
        self._plane.settle()
        return self._plane.array

    def replace(self, mask: NDArray[Any]) -> None:
        """See `Beside`."""
        self._plane.replace(mask)

    def end(self, draws: Draws, index: int) -> Plane:
        """Do the steps that are left but the last settling; return the mask."""
        self._moves.move(self._plane, draws, index, slice(self._done, None))
        return self._plane


def along_with(pipeline: Pipeline, data: bytes) -> Along | None:
    """Return a mask of a file for the steps of a pipeline that are called with one; None where there are none.

    Raises: ConfigError as `Moves`; DataError as `decode_mask`.
    """
    moves = Moves(pipeline)
    return Along(moves, Plane(decode_mask(np.frombuffer(data, np.uint8)))) if moves.called else None


def _stays_in_place(step: object) -> bool:
    if isinstance(step, RandomApply):
        return all(map(_stays_in_place, step.transforms))
    return isinstance(step, _IN_PLACE) or _is_users(step)


def _is_users(step: object) -> bool:
    """Whether a step is a callable of a user's, which gets the picture alone and leaves its pixels where they are."""
    return callable(step) and not isinstance(step, (Called, *AUGMENTS))


def _stay(part: Part, draws: Draws, index: int) -> None:
    """Leave a part where it is: the step does not move it, or is called with it."""


def _picture_move(numbers: StepNumbers) -> Move:
    def move(part: Part, draws: Draws, index: int) -> None:
        if needs_padding(part.geometry, numbers):
            part.settle()
            part.pad(Border(center_border(*part.geometry.size, numbers.height, numbers.width)))
        part.geometry = without_resize(part.geometry, numbers, draws.numbers[index].tolist())
        height, width = size_after(part.geometry, numbers)
        if (height, width) != part.geometry.size:
            if is_resampled(part.geometry):
                part.settle()
            part.geometry = resized_to(part.geometry, height, width, numbers.resampling)

    return move


def _border_move(step: Pad) -> Move:
    def move(part: Part, draws: Draws, index: int) -> None:
        part.settle()
        part.pad(step.border)

    return move


def _crop_move(step: RandomCrop, key: int) -> Move:
    def move(part: Part, draws: Draws, index: int) -> None:
        if borders := step.borders(*part.geometry.size):
            part.settle()
            for border in borders:
                part.pad(border)
        rng = generator_for(key, draws.epoch, int(draws.samples[index]))
        part.geometry = cropped(part.geometry, Box(*step.place(*part.geometry.size, rng)))

    return move


def _turn_move(step: RandomRotation, key: int) -> Move:
    def move(part: Part, draws: Draws, index: int) -> None:
        part.settle()
        part.turn(step.draw(generator_for(key, draws.epoch, int(draws.samples[index]))))

    return move


# -- Masks -----------------------------------------------------------------------------------------------------------


class MaskPass:
    """From the bytes of a mask to its place in the batch, as its picture's pipeline says.

    dtype: of the batch. fill: see `Plane`.
    Raises: as `Moves`; ConfigError if samples are no pictures of one height and width.
    """

    def __init__(self, pipeline: Pipeline, dtype: str, fill: int) -> None:
        self._given = pipeline, dtype, fill
        self._moves, self._fill = Moves(pipeline), fill
        #: Whether a step is called with picture and mask, so that the one is transformed between `begin` and `end`.
        self.has_images = self._moves.called is not None
        self.dtype = np.dtype(dtype)
        shape = pipeline.output_shape
        if len(shape) != 3:
            raise ConfigError(
                f"the transforms make {list(shape)} of a picture, which has no height and width for its mask: let them "
                "make a picture"
            )
        #: (height, width) of a mask in the batch.
        self.shape = shape[1:] if pipeline.layout == "NCHW" else shape[:2]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the same."""
        return MaskPass, self._given

    def begin(self, data: NDArray[np.uint8], size_of_picture: tuple[int, int] | None) -> Along:
        """Return a mask as it is stored. data: its file. size_of_picture: (height, width), None if it is not known.

        Raises: DataError if it is no mask, of another size than its picture, or has classes that `dtype` has not.
        """
        array = decode_mask(data)
        if size_of_picture is not None and array.shape != size_of_picture:
            raise DataError(
                f"it has {array.shape[1]} x {array.shape[0]} pixels, and its picture has {size_of_picture[1]} x "
                f"{size_of_picture[0]}: they must be of one size"
            )
        if array.dtype.itemsize > self.dtype.itemsize and array.max(initial=0) > np.iinfo(self.dtype).max:
            raise DataError(
                f'it has the class {array.max():,}, which {self.dtype} cannot hold: give mask_dtype="int32"'
            )
        return Along(self._moves, Plane(array, self._fill))

    def end(self, mask: Along, out: NDArray[Any], draws: Draws, index: int) -> None:
        """Write a mask to its place in the batch. Raises: DataError if it is of another size."""
        plane = mask.end(draws, index)
        if plane.geometry.size != out.shape:
            raise DataError(
                f"it comes out as {plane.geometry.size}, and its picture as {out.shape}: a callable among the "
                "transforms changes the size of pictures, which masks do not follow"
            )
        plane.write(out)


def decode_mask(data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the classes of a mask as a file stores them: integers [height, width], of a palette the indices.

    Raises: DataError if it has colours, is no image or damaged.
    """
    head = bytes(data[:26])
    if head[:8] == _PNG and head[_PNG_KIND] == _PNG_GREY and head[_PNG_BITS] >= 8:
        cv2: Any = importlib.import_module("cv2")
        array = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        if array is None:
            raise DataError(f"OpenCV cannot decode it: {len(data):,} bytes")
        return np.asarray(array)
    return _decode_by_pillow(data)


def _decode_by_pillow(data: NDArray[np.uint8]) -> NDArray[Any]:
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise DataError("masks of this kind are decoded by Pillow: pip install pillow") from error
    try:
        with image.open(io.BytesIO(data.tobytes())) as mask:
            array = np.asarray(mask)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"Pillow cannot decode it: {error}") from error
    if array.ndim != 2 or array.dtype.kind not in "biu":
        raise DataError(
            f"it is an image of mode {mask.mode}, and a mask has one number for each pixel (a PNG in grey or with a "
            "palette): write class numbers"
        )
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


# -- For a data set's own code ---------------------------------------------------------------------------------------


class Joint:
    """Transforms of an image with all that belongs to it, for the `__getitem__` of a data set.

    transforms: as of a loader of pictures; the steps that move pixels move all parts alike, others work on the image
        alone, as do callables, which must leave pixels where they are. albumentations' are called with image and mask,
        and take no other parts.
    mask_fill: what stands in a mask where the image was not. least_side: boxes with a shorter side, in pixels, after
        cutting off what lies outside, are left out.
    dtype, layout: of the image that comes out.

    Raises: ConfigError for transforms that cannot follow each other, may move pixels by rules of their own, or draw
        from global generators.

    >>> from penstock.loader.transforms import CenterCrop
    >>> joint = Joint([CenterCrop(2)])
    >>> picture = np.zeros((4, 4, 3), np.uint8)
    >>> joint(np.random.default_rng(0), image=picture, boxes=[[0, 0, 2, 3], [0, 0, 1, 1]], labels=[7, 8])["boxes"]
    array([[0., 0., 1., 2.]], dtype=float32)
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        *,
        mask_fill: int = 0,
        least_side: float = 1.0,
        dtype: str = "float32",
        layout: str = "NCHW",
    ) -> None:
        self._given = transforms, dtype, layout
        self._mask_fill, self._least_side = mask_fill, least_side
        self._pipeline = compile_pipeline(transforms, 0, dtype, layout)
        self._moves = Moves(self._pipeline)
        for step in self._pipeline.transforms:
            if isinstance(step, Called) and step.draws == "global":
                raise ConfigError(
                    f"{step} among the transforms draws from global random generators, and Joint is given one for each "
                    "sample: take albumentations 2, or Penstock's own steps"
                )
        self._threads = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _joint_again, (*self._given, self._mask_fill, self._least_side)

    def __call__(
        self,
        rng: np.random.Generator,
        *,
        image: Any,
        mask: Any = None,
        images: Mapping[str, Any] | None = None,
        masks: Mapping[str, Any] | None = None,
        boxes: Any = None,
        labels: Any = None,
        keypoints: Any = None,
    ) -> dict[str, Any]:
        """Return the parts that were given, transformed, by the same names.

        rng: of the sample, as `__getitem__` gets it.
        image: uint8[height, width, 3], or a PIL image in RGB. mask: integers [height, width], or several as [height,
            width, masks], or a PIL image.
        images, masks: more of these by names of yours, of the same height and width, as of a stereo camera or before
            and after: what is drawn for the image, colours too, is drawn for them.
        boxes: [n, 4] in pixels, left, above, right, below. labels: a row for each box.
        keypoints: [..., 2] in pixels, across and down; or [..., 3], of which the last becomes 0 outside of the image.
        Returns: image and images as the transforms make them; mask and masks of their types; boxes float32[m, 4] within
            the image, those that are left, and labels of these; keypoints float32, all of them.
        Raises: DataError naming the part that has another size or shape; ConfigError for a name that two parts have,
            or a part that a step of another library does not take.
        """
        if (called := self._moves.called) is not None:
            others = {"images": images, "masks": masks, "boxes": boxes, "keypoints": keypoints}
            if given := [name for name, part in others.items() if part is not None]:
                raise ConfigError(
                    f"{called} is called with image= and mask= alone, and Joint has {', '.join(given)}: leave them "
                    "out, or give masks as one, [height, width, masks]"
                )
        pictures = {name: _picture_of(name, each) for name, each in _named("image", image, images).items()}
        height, width = pictures["image"].shape[:2]
        draws = self._pipeline.draw(0, rng.integers(2**63, size=1))
        moved = {
            name: Along(self._moves, self._plane(name, np.asarray(each), height, width))
            for name, each in _named("mask", mask, masks, pictures).items()
        }
        made: dict[str, Any] = {}
        for name, picture in pictures.items():
            if picture.shape[:2] != (height, width):
                raise DataError(
                    f"{name} has {picture.shape[1]} x {picture.shape[0]} pixels, and image {width} x {height}: images "
                    "of a sample are of one size"
                )
            made[name] = self._pipeline.run_picture(picture, draws, 0, self._scratch(), moved.get("mask"))
        for name, along in moved.items():
            plane = along.end(draws, 0)
            plane.settle()
            made[name] = plane.array
        if boxes is not None:
            made |= self._moved_boxes(boxes, labels, height, width, draws)
        elif labels is not None:
            made["labels"] = labels
        if keypoints is not None:
            made["keypoints"] = self._moved_points(keypoints, height, width, draws)
        return made

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            scratch = self._threads.scratch = Scratch()
        return scratch

    def _plane(self, name: str, mask: NDArray[Any], height: int, width: int) -> Plane:
        if mask.shape[:2] != (height, width) or mask.ndim > 3 or mask.dtype.kind not in "biu":
            raise DataError(
                f"{name} is {mask.dtype}{list(mask.shape)}; it has an integer for each pixel of the image, "
                f"[{height}, {width}], or several, [{height}, {width}, masks]"
            )
        return Plane(mask, self._mask_fill)

    def _settled(self, points: NDArray[np.float64], height: int, width: int, draws: Draws) -> Marks:
        marks = Marks(points, height, width)
        self._moves.move(marks, draws, 0)
        marks.settle()
        return marks

    def _moved_boxes(
        self, boxes: Any, labels: Any, height: int, width: int, draws: Draws
    ) -> dict[str, NDArray[Any]]:
        given = (
            np.asarray(boxes, np.float64).reshape(-1, 4) if len(boxes) == 0 else np.asarray(boxes, np.float64)
        )
        if given.ndim != 2 or given.shape[1] != 4:
            raise DataError(f"boxes is {list(given.shape)}; it is [n, 4]: left, above, right and below")
        marks = self._settled(given[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2), height, width, draws)
        corners = marks.points.reshape(-1, 4, 2)
        ends = np.array(marks.geometry.size[::-1], np.float64)
        low, high = np.clip(corners.min(1), 0, ends), np.clip(corners.max(1), 0, ends)
        kept = ((high - low) >= self._least_side).all(axis=1)
        made: dict[str, NDArray[Any]] = {
            "boxes": np.concatenate([low, high], axis=1)[kept].astype(np.float32)
        }
        if labels is not None:
            known = np.asarray(labels)
            if len(known) != len(given):
                raise DataError(f"labels has {len(known)} rows for {len(given)} boxes: give one for each")
            made["labels"] = known[kept]
        return made

    def _moved_points(self, keypoints: Any, height: int, width: int, draws: Draws) -> NDArray[np.float32]:
        given = np.asarray(keypoints, np.float64)
        if given.ndim < 1 or given.shape[-1] not in (2, 3):
            raise DataError(
                f"keypoints is {list(given.shape)}; its last axis is across, down and, if there is a third number, "
                "whether it is seen"
            )
        found = given.copy()
        marks = self._settled(given[..., :2].reshape(-1, 2), height, width, draws)
        found[..., :2] = marks.points.reshape(found[..., :2].shape)
        if found.shape[-1] == 3:
            rows, columns = marks.geometry.size
            inside = ((found[..., :2] >= 0) & (found[..., :2] < (columns, rows))).all(axis=-1)
            found[..., 2] = np.where(inside, found[..., 2], 0)
        return found.astype(np.float32)


def _joint_again(
    transforms: Sequence[Transform], dtype: str, layout: str, mask_fill: int, least_side: float
) -> Joint:
    return Joint(transforms, mask_fill=mask_fill, least_side=least_side, dtype=dtype, layout=layout)


def _picture_of(name: str, image: Any) -> NDArray[np.uint8]:
    """Return an image as an array. Raises: DataError for another dtype or shape."""
    picture = as_picture(image)
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
        raise DataError(
            f"{name} is {_kind(image)}; it is uint8[height, width, 3] or a PIL image in RGB: .convert('RGB')"
        )
    return picture


def _named(
    name: str, one: Any, others: Mapping[str, Any] | None, known: Collection[str] = ()
) -> dict[str, Any]:
    """Return parts of one kind by name: that of the usual name, where there is one, and others.

    known: names of other parts. Raises: ConfigError for a name that another part has.
    """
    found = {} if one is None and name == "mask" else {name: one}
    for other, part in (others or {}).items():
        if other in (*found, *known, *_PARTS):
            raise ConfigError(
                f"{name}s has {other!r}, which another part is called: give it a name of its own"
            )
        found[other] = part
    return found


def _kind(value: Any) -> str:
    if is_pil(value):
        return f"a PIL image of mode {value.mode}"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else name_of(value)
